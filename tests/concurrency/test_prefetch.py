"""Prefetching: work in flight, dropped work, and no task that outlives the block."""

import asyncio

import pytest

from tplr.concurrency.prefetch import Prefetch


class Loads:
    """A load that ends when told to; counts beginnings and cancellations by key."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.gate = asyncio.Event()

    async def __call__(self, key: int) -> str:
        self.begun.append(key)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        return f"value {key}"


async def test_a_value_started_before_is_loaded_once():
    loads = Loads()
    async with Prefetch(loads) as ahead:
        ahead.start(1)
        ahead.start(1)
        await asyncio.sleep(0)
        loads.gate.set()
        assert await ahead.take(1) == "value 1"
        assert loads.begun == [1]
        assert await ahead.take(1) == "value 1"
        assert loads.begun == [1, 1]  # a taken value is forgotten
        assert await ahead.take(2) == "value 2"


async def test_one_more_than_the_size_drops_the_oldest():
    loads = Loads()
    async with Prefetch(loads, size=2) as ahead:
        for key in (1, 2, 3):
            ahead.start(key)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert loads.cancelled == [1]
        loads.gate.set()
        assert await ahead.take(3) == "value 3"
        assert loads.begun == [1, 2, 3]


async def test_leaving_cancels_what_nobody_took():
    loads = Loads()
    async with Prefetch(loads) as ahead:
        ahead.start(1)
        ahead.start(2)
        await asyncio.sleep(0)
    assert sorted(loads.cancelled) == [1, 2]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_a_take_cancels_its_load():
    loads = Loads()
    async with Prefetch(loads) as ahead:
        ahead.start(1)
        await asyncio.sleep(0)
        taking = asyncio.create_task(ahead.take(1))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert loads.cancelled == [1]


async def test_a_load_that_failed_early_is_tried_again_and_a_second_failure_is_raised():
    failures = [ValueError("first"), ValueError("second"), None]

    async def load(key):
        failure = failures.pop(0)
        if failure:
            raise failure
        return key

    async with Prefetch(load) as ahead:
        ahead.start(7)
        await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="second"):
            await ahead.take(7)
        assert await ahead.take(7) == 7


async def test_a_failure_nobody_asked_for_stays_silent(caplog):
    async def load(key):
        raise ValueError("unseen")

    async with Prefetch(load) as ahead:
        ahead.start(1)
        await asyncio.sleep(0.01)
    del ahead
    assert caplog.records == []
