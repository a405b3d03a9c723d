"""Read-ahead for coroutines: an event loop in a thread loads the next values while the caller uses the current one."""

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

OpenLoad = Callable[[], AbstractAsyncContextManager[Callable[[K], Awaitable[V]]]]


class LoadAhead(Generic[K, V]):
    """Loads ``keys`` in order; at most ``depth`` values are being loaded or wait to be taken.

    The thread ends when all keys are loaded, at ``close``, and when this object is garbage collected.

    Args:
        open_load: entered in the thread; yields the function that loads a key. Must not refer to this object's owner.
        threads: number of threads for the loads' own ``asyncio.to_thread``.
    """

    def __init__(self, open_load: OpenLoad[K, V], keys: Sequence[K], depth: int, threads: int) -> None:
        self._results: deque[Future[V]] = deque(Future() for _ in keys)
        self._loader = _Loader(open_load, [*zip(keys, self._results, strict=True)], depth, threads)
        self._thread = threading.Thread(target=self._loader.run, name="load ahead", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._loader.stop)

    def __len__(self) -> int:
        """Number of values left to take."""
        return len(self._results)

    def take(self) -> V:
        """Return the next value; block until it is loaded.

        Raises the error of its load, at every call; RuntimeError if it was not loaded before ``close``.
        """
        return self._taken(self._results[0].result())

    async def take_async(self) -> V:
        """Call ``take`` without blocking the event loop. A cancelled call takes nothing."""
        return self._taken(await asyncio.shield(asyncio.wrap_future(self._results[0])))

    async def wait(self) -> None:
        """Wait until the next value is loaded, if one is left. Raises the error of its load."""
        if self._results:
            await asyncio.shield(asyncio.wrap_future(self._results[0]))

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Tell the thread to end, without blocking."""
        self._loader.stop()

    def close(self) -> None:
        """End the thread and close what ``open_load`` opened; blocks while a load runs code that can't be cancelled."""
        self.stop()
        self._thread.join()

    def _taken(self, value: V) -> V:
        self._results.popleft()
        self._loader.call(self._loader.free.release)
        return value


class _Loader(Generic[K, V]):
    """Runs in the thread; has no reference to ``LoadAhead``, so that it can be garbage collected.

    Attributes:
        free: released when a value is taken.
    """

    def __init__(
        self, open_load: OpenLoad[K, V], jobs: "Sequence[tuple[K, Future[V]]]", depth: int, threads: int
    ) -> None:
        self.free = asyncio.Semaphore(depth)
        self._open_load = open_load
        self._jobs = deque(jobs)
        self._threads = threads
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), self._runner:
            self._runner.run(self._main())
        while self._jobs:
            self._jobs.popleft()[1].set_exception(_closed())

    def stop(self) -> None:
        """May be called from any thread, any number of times."""
        self._stopped = True
        if self._task:
            self.call(self._task.cancel)

    def call(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the loop, if that is not closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        if self._stopped:
            return
        # More threads than cores would only alternate, and each keeps its peak memory.
        self._loop.set_default_executor(ThreadPoolExecutor(self._threads, thread_name_prefix="load ahead"))
        try:
            async with self._open_load() as load, asyncio.TaskGroup() as group:
                while self._jobs:
                    await self.free.acquire()
                    group.create_task(_load(load, *self._jobs.popleft()))
        except Exception as error:  # noqa: BLE001 - nothing can be loaded: every later ``take`` raises it
            while self._jobs:
                self._jobs.popleft()[1].set_exception(error)


def _closed() -> RuntimeError:
    # Not a cancellation: the task that waits for the value was not cancelled.
    return RuntimeError("closed while the value was loaded, or before")


async def _load(load: Callable[[K], Awaitable[V]], key: K, result: "Future[V]") -> None:
    try:
        result.set_result(await load(key))
    except asyncio.CancelledError:
        result.set_exception(_closed())
        raise
    except Exception as error:  # noqa: BLE001 - raised by ``take`` of this key alone
        result.set_exception(error)
