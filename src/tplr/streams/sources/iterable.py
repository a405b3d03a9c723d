"""from_iterable: samples of an iterable, which has no random access."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tplr.errors import DataError, StateError
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.state import StateReader


class FromIterable(Transform):
    """Items of an iterable, for one epoch or endlessly. A resume reads and skips the items before its position, and so
    does the call after an error, which ends generators.

    An iterator, such as a generator, works for one pass only.
    """

    divisible = False  # a rank would read the items of all others

    def __init__(self, iterable: Iterable[Any], repeat: bool) -> None:
        self.iterable, self.repeat = iterable, repeat
        self.used = False

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        if isinstance(self.iterable, Iterator):
            if self.used:
                raise DataError("from_iterable: this iterator was read before; pass an iterable that can be read again")
            self.used = True
        return _IterableIterator(self, self.reader(state))

    def describe(self, *, pinned: bool) -> str:
        return f"from_iterable({'repeat' if self.repeat else ''})"


class _IterableIterator(StreamIterator[Any]):
    def __init__(self, transform: FromIterable, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._index = saved.integer("index") if saved else 0  # in this pass
        self._ended = saved.flag("ended") if saved else False
        self._items = self._from_index()
        self._failed = False  # the last call raised an error, which ends a generator

    def __next__(self) -> Any:
        while not self._ended:
            try:
                item = next(self._items)
            except StopIteration:
                if self._failed:
                    self._items, self._failed = self._reopened(), False
                    continue
                # An empty iterable would be repeated forever.
                self._ended = not self._transform.repeat or not self._index
                if not self._ended:
                    self._items, self._index = iter(self._transform.iterable), 0
                continue
            except BaseException:
                self._failed = True
                raise
            self._index, self._failed = self._index + 1, False
            return item
        raise StopIteration

    def _reopened(self) -> Iterator[Any]:
        if isinstance(self._transform.iterable, Iterator):
            raise DataError(
                f"from_iterable: an error after item {self._index} ended this iterator; pass an iterable that can be "
                f"read again"
            )
        return self._from_index()

    def _from_index(self) -> Iterator[Any]:
        items = iter(self._transform.iterable)
        skipped = sum(1 for _ in islice(items, self._index))
        if skipped < self._index:
            raise StateError(f"the state is after item {self._index}; the iterable has only {skipped} items")
        return items

    def state(self) -> State:
        return {"index": self._index, "ended": self._ended}

    def close(self) -> None:
        if hasattr(self._items, "close"):
            self._items.close()  # pyright: ignore[reportAttributeAccessIssue] - a generator
