"""Values in order, the next ones loaded by a thread's event loop while the present one is in use."""

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

K = TypeVar("K")
V = TypeVar("V")

OpenLoad = Callable[[], AbstractAsyncContextManager[Callable[[K], Awaitable[V]]]]


class LoadAhead(Generic[K, V]):
    """Loads ``keys`` in their order, up to ``depth`` of them at once or waiting to be taken.

    The thread ends when all is loaded, at ``close``, and when nobody holds this object any more.

    Args:
        open_load: entered in the thread; gives what loads a key. It must not refer to this object's owner.
    """

    def __init__(self, open_load: OpenLoad[K, V], keys: Sequence[K], depth: int) -> None:
        self._results: deque[Future[V]] = deque(Future() for _ in keys)
        self._work = _Work(open_load, deque(zip(keys, self._results, strict=True)), depth)
        self._thread = threading.Thread(target=self._work.run, name="load ahead", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._work.stop)

    def __len__(self) -> int:
        """How many values are left to take."""
        return len(self._results)

    def take(self) -> V:
        """The next value, as soon as it is there; blocks. What its load raised is raised here, each time."""
        return self._taken(self._results[0].result())

    async def take_async(self) -> V:
        """As ``take``, blocking nothing; a call that is cancelled takes nothing."""
        return self._taken(await asyncio.shield(asyncio.wrap_future(self._results[0])))

    async def wait(self) -> None:
        """Until the next value is there, if there is one left. Raises what its load raised."""
        if self._results:
            await asyncio.shield(asyncio.wrap_future(self._results[0]))

    @property
    def running(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end as soon as it can; blocks nothing."""
        self._work.stop()

    def close(self) -> None:
        """End the thread and what it holds; blocks for what is being decoded or tokenized at the moment."""
        self.stop()
        self._thread.join()

    def _taken(self, value: V) -> V:
        self._results.popleft()
        self._work.make_room()
        return value


class _Work(Generic[K, V]):
    """What the thread does; it holds no reference to ``LoadAhead``, so that one can be collected."""

    def __init__(self, open_load: OpenLoad[K, V], jobs: deque[tuple[K, Future[V]]], depth: int) -> None:
        self._open_load = open_load
        self._jobs = jobs
        self._room = asyncio.Semaphore(depth)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._main())
        for _, result in self._jobs:
            result.cancel()

    def stop(self) -> None:
        """From any thread, any number of times."""
        self._stopped = True
        if self._loop and self._task:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
                self._loop.call_soon_threadsafe(self._task.cancel)

    def make_room(self) -> None:
        if self._loop:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._room.release)

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopped:
            return
        # With more of them than cores they take turns, and each keeps the most memory that it ever had.
        self._loop.set_default_executor(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="load ahead"))
        try:
            async with self._open_load() as load, asyncio.TaskGroup() as group:
                while self._jobs:
                    await self._room.acquire()
                    group.create_task(_load(load, *self._jobs.popleft()))  # what was taken is not kept here
        except Exception as error:  # noqa: BLE001 - nothing can be loaded: whoever takes next is told
            while self._jobs:
                self._jobs.popleft()[1].set_exception(error)


async def _load(load: Callable[[K], Awaitable[V]], key: K, result: Future[V]) -> None:
    try:
        result.set_result(await load(key))
    except asyncio.CancelledError:
        result.cancel()
        raise
    except Exception as error:  # noqa: BLE001 - belongs to this value: those before and after it are none the worse
        result.set_exception(error)
