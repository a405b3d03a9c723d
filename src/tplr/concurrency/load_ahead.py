"""Read-ahead for coroutines: an event loop in a thread loads the next values while the caller uses the present one."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from tplr.concurrency.read_ahead import ReadAhead

K = TypeVar("K")
V = TypeVar("V")

OpenLoad = Callable[[], AbstractAsyncContextManager[Callable[[K], Awaitable[V]]]]


class LoadAhead(Generic[K, V]):
    """Loads ``keys`` in order; at most ``depth`` values are being loaded or wait to be taken.

    The thread ends when all keys are loaded, at ``close``, and when this object is garbage collected.

    Args:
        open_load: entered in the thread; gives the function that loads a key. It must not refer to this object's owner.
    """

    def __init__(self, open_load: OpenLoad[K, V], keys: Sequence[K], depth: int) -> None:
        self._left = len(keys)
        self._loader = _Loader(open_load, len(keys))
        self._ahead = ReadAhead(keys, self._loader.submit, depth)
        self._thread = threading.Thread(target=self._loader.run, name="load ahead", daemon=True)
        self._ahead.fill()
        self._thread.start()
        weakref.finalize(self, self._loader.stop)

    def __len__(self) -> int:
        """Number of values left to take."""
        return self._left

    def take(self) -> V:
        """The next value; blocks until it is loaded. Raises what its load raised, at every call."""
        return self._taken(self._next().result())

    async def take_async(self) -> V:
        """As ``take``, without blocking the event loop. A cancelled call takes nothing."""
        return self._taken(await asyncio.shield(asyncio.wrap_future(self._next())))

    async def wait(self) -> None:
        """Wait until the next value is loaded, if one is left. Raises what its load raised."""
        if self._left:
            await asyncio.shield(asyncio.wrap_future(self._next()))

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Tell the thread to end; blocks nothing."""
        self._loader.stop()

    def close(self) -> None:
        """End the thread and close what ``open_load`` opened; blocks while a load runs code that can't be cancelled."""
        self.stop()
        self._thread.join()

    def _next(self) -> "Future[V]":
        return next(self._ahead.pending)[1]

    def _taken(self, value: V) -> V:
        next(self._ahead)
        self._left -= 1
        self._ahead.fill()
        return value


class _Loader(Generic[K, V]):
    """Runs in the thread; holds no reference to ``LoadAhead``, so that one can be garbage collected."""

    def __init__(self, open_load: OpenLoad[K, V], count: int) -> None:
        self._open_load = open_load
        self._count = count
        self._jobs: deque[tuple[K, Future[V]]] = deque()
        self._submitted = asyncio.Semaphore(0)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._stopped = False

    def submit(self, key: K) -> "Future[V]":
        result: Future[V] = Future()
        self._jobs.append((key, result))
        try:
            self._loop.call_soon_threadsafe(self._submitted.release)
        except RuntimeError:  # the loop is closed
            self._refuse_jobs()
        return result

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())
        self._refuse_jobs()

    def stop(self) -> None:
        """May be called from any thread, any number of times."""
        self._stopped = True
        if self._task:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        if self._stopped:
            return
        # More threads than cores would take turns, and each keeps the most memory that it ever had.
        self._loop.set_default_executor(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="load ahead"))
        try:
            async with self._open_load() as load, asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    await self._submitted.acquire()
                    group.create_task(_load(load, *self._jobs.popleft()))
        except Exception as error:  # noqa: BLE001 - nothing can be loaded: every later ``take`` raises it
            self._error = error

    def _refuse_jobs(self) -> None:
        while self._jobs:
            result = self._jobs.popleft()[1]
            if self._error:
                result.set_exception(self._error)
            else:
                result.cancel()


async def _load(load: Callable[[K], Awaitable[V]], key: K, result: "Future[V]") -> None:
    try:
        result.set_result(await load(key))
    except asyncio.CancelledError:
        result.cancel()
        raise
    except Exception as error:  # noqa: BLE001 - raised by ``take`` of this key alone
        result.set_exception(error)
