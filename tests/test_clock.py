"""The clock of windows: arithmetic, ticks, missed windows, and chains that stall."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tplr.clock import Tick, WindowClock, block_to_window, first_block
from tplr.errors import ChainUnavailable


class BlockSource:
    """A stream of blocks and a monotonic time, both advanced by the test."""

    def __init__(self):
        self._queue = asyncio.Queue()
        self.time = 100.0

    async def blocks(self):
        while (number := await self._queue.get()) is not None:
            yield number

    async def send(self, *numbers):
        for number in numbers:
            self._queue.put_nowait(number)
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def running(feed, **settings):
    clock = WindowClock(
        feed.blocks, monotonic=lambda: feed.time, **({"blocks_per_window": 10, "block_time": 12.0} | settings)
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(clock.run())
        yield clock
        task.cancel()


def test_windows_cover_the_blocks():
    assert [block_to_window(block, 3) for block in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    for window in range(5):
        start = first_block(window, 7)
        assert block_to_window(start, 7) == window
        assert block_to_window(start - 1, 7) == window - 1


async def test_there_is_no_now_before_the_first_block():
    feed = BlockSource()
    async with running(feed) as clock:
        for read in (lambda: clock.block, lambda: clock.window, clock.seconds_left):
            with pytest.raises(ChainUnavailable, match="no block seen"):
                read()
        await feed.send(25)
        assert (clock.block, clock.window) == (25, 2)
        assert await clock.wait_for_block(0) == 25


async def test_ticks_give_the_newest_window_and_count_the_missed():
    feed = BlockSource()
    async with running(feed) as clock:
        ticks = clock.ticks()
        await feed.send(25)
        assert await anext(ticks) == Tick(2, 0)
        await feed.send(26, 29, 30, 31)
        assert await anext(ticks) == Tick(3, 0)
        await feed.send(*range(32, 75))
        assert await anext(ticks) == Tick(7, 3)
        following = asyncio.create_task(anext(ticks))
        await feed.send(76, 79)
        assert not following.done()
        await feed.send(80)
        assert await following == Tick(8, 0)


async def test_each_consumer_has_ticks_of_its_own():
    feed = BlockSource()
    async with running(feed) as clock:
        slow, fast = clock.ticks(), clock.ticks()
        await feed.send(10)
        assert await anext(slow) == await anext(fast) == Tick(1, 0)
        await feed.send(20)
        assert await anext(fast) == Tick(2, 0)
        await feed.send(30)
        assert await anext(fast) == Tick(3, 0)
        assert await anext(slow) == Tick(3, 1)


async def test_repeated_and_earlier_blocks_change_nothing():
    feed = BlockSource()
    async with running(feed) as clock:
        await feed.send(30)
        feed.time += 5
        await feed.send(30, 29)
        assert (clock.block, clock.window) == (30, 3)
        assert clock.seconds_left() == 10 * 12 - 5


async def test_waiting_for_a_window():
    feed = BlockSource()
    async with running(feed) as clock:
        waiting = [asyncio.create_task(clock.wait_for_window(window)) for window in (3, 4)]
        await feed.send(29)
        assert not any(task.done() for task in waiting)
        await feed.send(30)
        assert [task.done() for task in waiting] == [True, False]
        await feed.send(57)
        assert [await task for task in waiting] == [3, 5]
        assert await clock.wait_for_window(1) == 5


async def test_seconds_left_run_down_and_stop_at_zero_while_the_chain_stalls():
    feed = BlockSource()
    async with running(feed) as clock:
        await feed.send(38)
        assert clock.seconds_left() == 24.0
        feed.time += 23.5
        assert clock.seconds_left() == 0.5
        feed.time += 3600
        assert clock.seconds_left() == 0.0
        waiting = asyncio.create_task(clock.wait_for_window(4))
        await feed.send(39)
        assert clock.seconds_left() == 12.0
        assert not waiting.done()
        await feed.send(40)
        assert await waiting == 4
        assert clock.seconds_left() == 120.0


async def test_a_stream_that_ends_is_an_error_and_no_silence():
    feed = BlockSource()
    clock = WindowClock(feed.blocks, blocks_per_window=10, block_time=12.0)
    following = asyncio.create_task(clock.run())
    await feed.send(1, None)
    with pytest.raises(ChainUnavailable, match="ended"):
        await following


@pytest.mark.parametrize("wrong", [{"blocks_per_window": 0}, {"block_time": 0.0}])
def test_sizes_must_be_positive(wrong):
    with pytest.raises(ValueError, match="positive"):
        WindowClock(BlockSource, **({"blocks_per_window": 1, "block_time": 1.0} | wrong))
