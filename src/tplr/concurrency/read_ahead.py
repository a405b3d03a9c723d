"""Read-ahead: submits work before its result is needed, a bounded number of items at a time."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ReadAhead(Generic[K, V]):
    """Iterates over ``(item, future)``; each future is done, and the next items have been submitted.

        for page, future in ReadAhead(pages, submit, depth=4):
            rows = future.result()

    If ``items`` raises, or a wait is interrupted, nothing is lost: ``next`` continues there. For one thread.

    Args:
        items: items to submit, in order.
        submit: starts the work of an item.
        depth: largest number of items that are submitted and not returned yet.
        ordered: return items in their order; otherwise in order of completion.
        lazy: submit one item per ``next``, and more only while no result is ready: for items that are slow to create.

    Attributes:
        depth: may change.
    """

    def __init__(
        self,
        items: Iterable[K],
        submit: "Callable[[K], Future[V]]",
        depth: int,
        *,
        ordered: bool = True,
        lazy: bool = False,
    ) -> None:
        self._items = iter(items)
        self._submit = submit
        self.depth = depth
        self._lazy = lazy
        self._pending: dict[Future[V], K] = {}
        self._done: SimpleQueue[Future[V]] | None = None if ordered else SimpleQueue()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> "tuple[K, Future[V]]":
        self.fill()
        if not self._pending:
            raise StopIteration
        if self._done is not None:
            future = self._done.get()
        else:
            future = next(iter(self._pending))
            if not future.done():
                wait((future,))
        return self._pending.pop(future), future

    @property
    def pending(self) -> "Iterator[tuple[K, Future[V]]]":
        """Yield submitted items that were not returned, in order, with their futures, done or not."""
        return ((item, future) for future, item in self._pending.items())

    def fill(self) -> None:
        """Submit as many items as ``depth`` and ``lazy`` allow."""
        first = True
        while len(self._pending) < self.depth and (first or not (self._lazy and self._is_ready())):
            first = False
            for item in self._items:
                future = self._submit(item)
                self._pending[future] = item
                if self._done is not None:
                    future.add_done_callback(self._done.put)
                break
            else:
                return

    def close(self) -> None:
        """Cancel the work of submitted items that were not returned, without blocking."""
        for future in self._pending:
            future.cancel()

    def _is_ready(self) -> bool:
        return next(iter(self._pending)).done() if self._done is None else not self._done.empty()
