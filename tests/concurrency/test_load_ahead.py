"""``load_ahead``: when items are loaded, the order of results, and no task that outlives the iterator."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from functools import partial

import pytest

from tplr.concurrency.load_ahead import LoadAhead


class Library:
    """Loads that record when they begin; a key waits for its gate if it has one."""

    def __init__(self, *gated: int) -> None:
        self.begun: list[int] = []
        self.open = False
        self.gates = {key: threading.Event() for key in gated}

    @contextlib.asynccontextmanager
    async def __call__(self):
        self.open = True
        try:
            yield self.load
        finally:
            self.open = False

    async def load(self, key: int) -> str:
        self.begun.append(key)
        if key in self.gates:
            await asyncio.to_thread(self.gates[key].wait, 10)
        if key < 0:
            raise ValueError(f"no {key}")
        return f"value {key}"


def until(condition) -> None:
    for _ in range(5000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come to that")


def no_threads() -> bool:
    return not any(thread.name == "load ahead" for thread in threading.enumerate())


def test_values_come_in_order_and_only_so_many_are_loaded_ahead():
    library = Library(0)
    ahead = LoadAhead(library, [0, 1, 2, 3, 4], depth=3, threads=2)
    until(lambda: library.begun == [0, 1, 2])
    time.sleep(0.02)
    assert library.begun == [0, 1, 2]
    library.gates[0].set()
    assert ahead.take() == "value 0"
    until(lambda: library.begun == [0, 1, 2, 3])
    assert [ahead.take() for _ in range(len(ahead))] == ["value 1", "value 2", "value 3", "value 4"]
    until(no_threads)
    assert not library.open


def test_loads_have_so_many_threads():
    inside: list[int] = []
    gate = threading.Event()

    def work(key: int) -> int:
        inside.append(key)
        gate.wait(10)
        return key

    @contextlib.asynccontextmanager
    async def make():
        yield partial(asyncio.to_thread, work)

    ahead = LoadAhead(make, range(4), depth=4, threads=2)
    until(lambda: len(inside) == 2)
    time.sleep(0.02)
    assert inside == [0, 1]
    gate.set()
    assert [ahead.take() for _ in range(4)] == [0, 1, 2, 3]
    ahead.close()


async def test_waiting_blocks_no_loop_and_a_cancelled_take_takes_nothing():
    library = Library(7)
    ahead = LoadAhead(library, [7, 8], depth=2, threads=2)
    taking = asyncio.create_task(ahead.take_async())
    await asyncio.sleep(0.01)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    library.gates[7].set()
    await ahead.wait()
    assert [await ahead.take_async(), await ahead.take_async()] == ["value 7", "value 8"]
    await ahead.wait()
    await asyncio.to_thread(ahead.close)


async def test_who_waits_when_another_task_closes_it_gets_an_error_and_is_not_cancelled():
    library = Library(7)
    ahead = LoadAhead(library, [7, 8], depth=1, threads=2)
    taking = asyncio.create_task(ahead.take_async())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(asyncio.to_thread(ahead.close))
    (ended,) = await asyncio.gather(taking, return_exceptions=True)
    library.gates[7].set()  # of the load, which the close waits for
    await closing
    assert isinstance(ended, RuntimeError)
    assert "closed" in str(ended)
    with pytest.raises(RuntimeError, match="closed"):
        ahead.take()


def test_a_failure_comes_in_its_turn():
    ahead = LoadAhead(Library(), [1, -2, 3], depth=3, threads=2)
    assert ahead.take() == "value 1"
    for _ in range(2):
        with pytest.raises(ValueError, match="no -2"):
            ahead.take()
    ahead.close()


def test_what_can_not_be_opened_fails_each_load():
    @contextlib.asynccontextmanager
    async def broken():
        raise OSError("no way in")
        yield

    ahead = LoadAhead(broken, [1, 2], depth=1, threads=2)
    with pytest.raises(OSError, match="no way in"):
        ahead.take()
    until(no_threads)


def test_closing_and_being_forgotten_end_it():
    library = Library()
    ahead = LoadAhead(library, [1, 2, 3], depth=2, threads=2)  # the third waits for space
    until(lambda: library.begun == [1, 2])
    ahead.close()
    ahead.close()
    assert no_threads()
    assert not library.open
    ahead = LoadAhead(library, [1, 2, 3], depth=2, threads=2)
    until(lambda: library.open)
    del ahead
    gc.collect()
    until(no_threads)
    assert not library.open


def test_what_was_taken_is_not_kept():
    class Value:
        pass

    alive: weakref.WeakSet[Value] = weakref.WeakSet()

    @contextlib.asynccontextmanager
    async def make():
        async def load(key):
            alive.add(value := Value())
            return value

        yield load

    ahead = LoadAhead(make, range(40), depth=3, threads=2)
    for _ in range(30):
        ahead.take()
    until(lambda: gc.collect() is not None and len(alive) <= 4)
    ahead.close()
