"""take, enumerate and stride: transforms that count samples."""

from collections.abc import Iterator, Sequence
from typing import Any

from tplr.errors import StateError
from tplr.sharding import Share, check_stride, per_rank
from tplr.streams.iterator import Part, PassingIterator, State, StreamIterator, Transform
from tplr.streams.state import StateReader


class _Counting(Transform):
    """Counts the samples of its rank, as ``key`` of the state; other ranks continue a count that is equal on all."""

    key: str

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        """See ``Transform``. A rank that has not begun has count 0; one that has ended has nothing left to count."""
        begun = [self.reader(part.state) for part in parts if not part.ended]
        counts = [saved.integer(self.key) if saved else 0 for saved in begun]
        if len(set(counts)) > 1:
            raise StateError(
                f"{self.describe(pinned=False)}: {self.key} differs between the ranks ({', '.join(map(str, counts))}), "
                f"so these states fit the same number of ranks and workers only: save the states of all ranks after "
                f"equally many samples"
            )
        return super().divide(parts, share)

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        return {self.key: saved[0].integer(self.key) if saved else 0}


class _TakeIterator(PassingIterator):
    def __init__(self, transform: "Take", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._count = transform.count
        self._taken = saved.integer("taken") if saved else 0

    def items(self) -> Iterator[Any]:
        if self._taken >= self._count:
            return
        for sample in self.source.items():
            self._taken += 1
            yield sample
            if self._taken >= self._count:
                return

    def state(self) -> State:
        return {"source": self.source.state(), "taken": self._taken}


class Take(_Counting):
    """The first ``count`` samples; reads no more from the source."""

    iterator = _TakeIterator
    key = "taken"

    def __init__(self, source: Transform, count: int) -> None:
        if count < 0:
            raise ValueError(f"take: expected 0 or more, got {count}")
        self.sources = (source,)
        self.count = count

    def describe(self, *, pinned: bool) -> str:
        return "take"  # the state holds the number of samples taken; the limit may change


class _EnumerateIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: "Enumerate", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._column = transform.column
        self._count = saved.integer("count") if saved else 0

    def items(self) -> Iterator[dict[str, Any]]:
        for sample in self.source.items():
            self._count += 1
            yield {**sample, self._column: self._count - 1}

    def state(self) -> State:
        return {"source": self.source.state(), "count": self._count}


class Enumerate(_Counting):
    """Adds each sample's number, from 0, as ``column`` of a new dictionary."""

    iterator = _EnumerateIterator
    key = "count"

    def __init__(self, source: Transform, column: str) -> None:
        self.sources = (source,)
        self.column = column

    def describe(self, *, pinned: bool) -> str:
        return f"enumerate({self.column})"


class _StrideIterator(PassingIterator):
    def __init__(self, transform: "Stride", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._interval, self._offset = transform.interval, transform.offset
        # Of all ranks, if each is as far as this one; the other ranks' samples are skipped at the next sample.
        self._consumed = saved.integer("consumed") if saved else 0
        # From the source. States of earlier versions have skipped the other ranks' samples, and lack this number.
        self._read = saved.integer("read") if saved and saved.has("read") else self._consumed
        self._ended = saved.flag("ended") if saved else False
        if self._ended:
            return
        per_rank(self._consumed, self._interval)
        if (skipped := self._read - self._consumed) > self._offset:
            raise StateError(
                f"the state was saved after an error, and does not fit rank {self._offset}: samples of ranks below "
                f"{skipped} had been skipped; use this rank's own state, or one saved after a sample"
            )

    def items(self) -> Iterator[Any]:
        if self._ended:
            return
        for sample in self.source.items():
            self._read += 1
            if self._read > self._consumed + self._offset:
                self._consumed += self._interval
                yield sample
        self._ended = True

    def state(self) -> State:
        counts = {"consumed": self._consumed, "read": self._read, "ended": self._ended}
        return {"source": self.source.state(), **counts}


class Stride(Transform):
    """The samples whose number modulo ``interval`` is ``offset``; the others are read and skipped.

    A state counts the samples that all ranks have consumed if they are equally far. It fits each rank, and any other
    interval that divides this number. If a later transform carries data of one rank, such as leftover tokens or a
    count, a state fits that rank only. A state saved after an error does not fit ranks whose samples were skipped.
    """

    iterator = _StrideIterator
    carries = False

    def __init__(self, source: Transform, interval: int, offset: int) -> None:
        check_stride(interval, offset)
        self.sources = (source,)
        self.interval, self.offset = interval, offset

    def describe(self, *, pinned: bool) -> str:
        return f"stride({self.interval}, {self.offset})" if pinned else "stride"
