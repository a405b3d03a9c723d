"""Combines several pipelines: one after the other, or interleaved by weight."""

from collections.abc import Sequence
from typing import Any

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.round_robin import WeightedRoundRobin


class Interleave(Transform):
    """Samples of all sources in the order of ``WeightedRoundRobin(weights)``; ends when the first source ends."""

    def __init__(self, sources: Sequence[Transform], weights: Sequence[float] | None) -> None:
        self.sources = tuple(sources)
        self.weights = [1.0] * len(self.sources) if weights is None else [float(weight) for weight in weights]
        if not self.sources or len(self.weights) != len(self.sources):
            raise ValueError(
                f"interleave_datasets: expected one weight for each of 1 or more datasets, got "
                f"{len(self.sources)} datasets and {len(self.weights)} weights"
            )
        WeightedRoundRobin(self.weights)  # refuses wrong weights here rather than at the first sample

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        states = state["sources"] if state else [None] * len(self.sources)
        iterators = [source.open(context, one) for source, one in zip(self.sources, states, strict=True)]
        return _InterleaveIterator(iterators, WeightedRoundRobin(self.weights), state)

    def describe(self, *, pinned: bool) -> str:
        return f"interleave({', '.join(map(repr, self.weights))})"


class _InterleaveIterator(StreamIterator[Any]):
    def __init__(self, iterators: list[StreamIterator[Any]], turns: WeightedRoundRobin, state: State | None) -> None:
        super().__init__()
        self._iterators = iterators
        self._turns = turns
        self._ended: bool = state["ended"] if state else False
        if state:
            turns.held = list(state["credits"])

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        before = self._turns.held
        try:
            return next(self._iterators[self._turns.next()])
        except StopIteration:
            self._ended = True
            raise
        except BaseException:
            self._turns.held = before  # the next call reads the same source
            raise

    def state(self) -> State:
        return {
            "sources": [iterator.state() for iterator in self._iterators],
            "credits": self._turns.held,
            "ended": self._ended,
        }

    def sources(self) -> list[StreamIterator[Any]]:
        return self._iterators


class Concat(Transform):
    """All samples of the first source, then those of the next; a source is opened when the one before it ends."""

    def __init__(self, sources: Sequence[Transform]) -> None:
        if not sources:
            raise ValueError("concat_datasets: expected one dataset or more, got none")
        self.sources = tuple(sources)

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _ConcatIterator(self, context, state)

    def describe(self, *, pinned: bool) -> str:
        return f"concat({len(self.sources)})"


class _ConcatIterator(StreamIterator[Any]):
    def __init__(self, transform: Concat, context: PipelineContext, state: State | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._index: int = state["index"] if state else 0
        self.source: StreamIterator[Any] = transform.sources[self._index].open(
            context, state["source"] if state else None
        )
        self.counts = dict(state["counts"]) if state else {}  # of the sources before this one

    def __next__(self) -> Any:
        while True:
            try:
                return next(self.source)
            except StopIteration:
                if self._index + 1 == len(self._transform.sources):
                    raise
            self.source.close()
            self.counts = self.report()
            self._index += 1
            self.source = self._transform.sources[self._index].open(self._context)

    def state(self) -> State:
        return {"index": self._index, "source": self.source.state(), "counts": dict(self.counts)}
