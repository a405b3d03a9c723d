"""Block streams that break, go silent, skip and repeat, and deadlines over calls that do not end."""

import asyncio
import time
from contextlib import aclosing

import pytest

from tplr.chain.follow import follow, within
from tplr.errors import ChainUnavailable


async def test_numbers_come_once_each_without_gaps_however_often_the_subscription_breaks():
    lost = ChainUnavailable("connection lost")
    subscriptions = [[5, 6, lost], [6, 5, 9], [lost], [9, 10, 10, 7, 12]]
    recovered = []

    async def subscribe():
        for entry in subscriptions.pop(0):
            if isinstance(entry, Exception):
                raise entry
            yield entry

    async def recover(last):
        recovered.append(last)

    async with aclosing(follow(subscribe, recover, block_time=0.001)) as blocks:
        assert [await anext(blocks) for _ in range(8)] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert recovered == [6, 9, 9]


async def test_a_silent_subscription_is_left_even_if_it_does_not_want_to_go(monkeypatch):
    """Unsubscribing is also a request to the node, and a mute node does not answer it."""
    monkeypatch.setattr("tplr.chain.follow.CLOSE_TIMEOUT", 0.02)
    opened = 0

    async def subscribe():
        nonlocal opened
        opened += 1
        try:
            yield opened
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    async def recover(last):
        pass

    async with aclosing(follow(subscribe, recover, block_time=0.001)) as blocks:
        assert [await anext(blocks) for _ in range(3)] == [1, 2, 3]


async def test_a_node_that_says_only_blocks_from_before_is_left_as_a_silent_one_is():
    """It lags behind the previous node: for hours, each of its blocks is an old one."""
    recovered = []

    async def subscribe():
        if len(recovered) == 1:
            for number in range(4000):
                yield number
                await asyncio.sleep(0.001)
        yield 5000 + len(recovered)

    async def recover(last):
        recovered.append(last)

    async with aclosing(follow(subscribe, recover, block_time=0.02)) as blocks, asyncio.timeout(30):
        assert await anext(blocks) == 5000
        began = time.monotonic()
        assert await anext(blocks) == 5001
    assert recovered == [5000, 5000]
    assert time.monotonic() - began < 2


async def test_a_deadline_holds_for_a_call_that_hangs_in_its_clean_up(monkeypatch):
    monkeypatch.setattr("tplr.chain.follow.CLOSE_TIMEOUT", 0.02)

    async def stubborn():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(60)

    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        await within(0.01, stubborn())
    task = asyncio.create_task(within(60, stubborn()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 30


async def test_results_and_errors_pass_through():
    async def fail():
        raise ValueError("no")

    assert await within(1, asyncio.sleep(0, "yes")) == "yes"
    with pytest.raises(ValueError, match="no"):
        await within(1, fail())
