"""Several pipelines as one: one after the other, or mixed by weight."""

from collections.abc import Sequence
from typing import Any

from tplr.streams.iterator import Flow, Run, State, Step
from tplr.streams.round_robin import WeightedRoundRobin


class Interleave(Step):
    """Samples of all sources in the order of ``WeightedRoundRobin(weights)``; ends with the first source that ends."""

    def __init__(self, sources: Sequence[Step], weights: Sequence[float] | None) -> None:
        self.sources = tuple(sources)
        self.weights = [1.0] * len(self.sources) if weights is None else [float(weight) for weight in weights]
        if not self.sources or len(self.weights) != len(self.sources):
            raise ValueError(
                f"interleave_datasets: expected one weight for each of 1 or more datasets, got "
                f"{len(self.sources)} datasets and {len(self.weights)} weights"
            )
        WeightedRoundRobin(self.weights)  # refuses what it can't use, here rather than at the first sample

    def open(self, run: Run, state: State | None = None) -> Flow[Any]:
        states = state["sources"] if state else [None] * len(self.sources)
        flows = [source.open(run, one) for source, one in zip(self.sources, states, strict=True)]
        return _InterleaveFlow(flows, WeightedRoundRobin(self.weights), state)

    def describe(self, *, pinned: bool) -> str:
        return f"interleave({', '.join(map(repr, self.weights))})"


class _InterleaveFlow(Flow[Any]):
    def __init__(self, flows: list[Flow[Any]], turns: WeightedRoundRobin, state: State | None) -> None:
        super().__init__()
        self._flows = flows
        self._turns = turns
        self._ended: bool = state["ended"] if state else False
        if state:
            turns.held = list(state["credits"])

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        before = self._turns.held
        try:
            return next(self._flows[self._turns.next()])
        except StopIteration:
            self._ended = True
            raise
        except BaseException:
            self._turns.held = before  # that source's turn again
            raise

    def state(self) -> State:
        return {
            "sources": [flow.state() for flow in self._flows],
            "credits": self._turns.held,
            "ended": self._ended,
        }

    def sources(self) -> list[Flow[Any]]:
        return self._flows


class Concat(Step):
    """All samples of the first source, then those of the next; each is opened when its turn comes."""

    def __init__(self, sources: Sequence[Step]) -> None:
        if not sources:
            raise ValueError("concat_datasets: expected one dataset or more, got none")
        self.sources = tuple(sources)

    def open(self, run: Run, state: State | None = None) -> Flow[Any]:
        return _ConcatFlow(self, run, state)

    def describe(self, *, pinned: bool) -> str:
        return f"concat({len(self.sources)})"


class _ConcatFlow(Flow[Any]):
    def __init__(self, step: Concat, run: Run, state: State | None) -> None:
        super().__init__()
        self._step = step
        self._run = run
        self._index: int = state["index"] if state else 0
        self.source: Flow[Any] = step.sources[self._index].open(run, state["source"] if state else None)
        self.counts = dict(state["counts"]) if state else {}  # of the sources before this one

    def __next__(self) -> Any:
        while True:
            try:
                return next(self.source)
            except StopIteration:
                if self._index + 1 == len(self._step.sources):
                    raise
            self.source.close()
            self.counts = self.report()
            self._index += 1
            self.source = self._step.sources[self._index].open(self._run)

    def state(self) -> State:
        return {"index": self._index, "source": self.source.state(), "counts": dict(self.counts)}
