"""Read-ahead by key on the caller's event loop: the caller announces the keys that it will probably need."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Prefetch(AbstractAsyncContextManager["Prefetch[K, V]", None], Generic[K, V]):
    """Starts loads before their values are needed; an async context manager that cancels loads that were not taken.

    ``ReadAhead`` and ``LoadAhead`` need the whole order of items in advance. Here keys become known over time, they may
    be taken in any order or never, and a load runs on its caller's event loop, among its tasks.

        async with Prefetch(load, size=1) as ahead:
            ahead.start(window + 1)           # returns at once
            value = await ahead.take(window)  # loaded before, being loaded, or loaded now

    Args:
        load: loads the value of a key.
        size: largest number of started loads that are not taken; one more cancels the oldest.
    """

    def __init__(self, load: Callable[[K], Coroutine[Any, Any, V]], *, size: int = 3) -> None:
        self._load = load
        self._size = size
        self._tasks: dict[K, asyncio.Task[V]] = {}
        self._dropped: set[asyncio.Task[V]] = set()

    async def __aexit__(self, *_: object) -> None:
        self.clear()
        while self._dropped:
            await asyncio.wait(self._dropped)

    def clear(self) -> None:
        """Cancel the loads that are not taken."""
        for key in [*self._tasks]:
            self._drop(key)

    def start(self, key: K) -> None:
        """Start to load ``key``, unless that has started already."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._load(key))
            while len(self._tasks) > self._size:
                self._drop(next(iter(self._tasks)))

    async def take(self, key: K) -> V:
        """Return the value of ``key``, and do not keep it. Raises the errors of ``load``.

        A load that failed before this call is retried, because the cause may have ended.
        """
        task = self._tasks.pop(key, None)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            return await self._load(key)
        return await task

    def _drop(self, key: K) -> None:
        task = self._tasks.pop(key)
        self._dropped.add(task)
        task.add_done_callback(self._forget)
        task.cancel()

    def _forget(self, task: asyncio.Task[V]) -> None:
        self._dropped.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that the loop logs no error
