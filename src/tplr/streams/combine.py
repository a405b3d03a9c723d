"""Combines several pipelines: one after the other, or interleaved by weight."""

from collections.abc import Sequence
from typing import Any

from tplr.sharding import Share
from tplr.streams.iterator import Part, PipelineContext, State, StreamIterator, Transform, dealt_counts
from tplr.streams.round_robin import WeightedRoundRobin
from tplr.streams.state import StateReader


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
        saved = self.reader(state)
        states = saved.items("sources", length=len(self.sources), kind=dict) if saved else [None] * len(self.sources)
        iterators = [source.open(context, one) for source, one in zip(self.sources, states, strict=True)]
        return _InterleaveIterator(iterators, WeightedRoundRobin(self.weights), saved)

    def settle(self, context: PipelineContext, state: State) -> State:
        states = StateReader(self.describe(pinned=False), state).items("sources", length=len(self.sources), kind=dict)
        settled = [source.settle(context, one) for source, one in zip(self.sources, states, strict=True)]
        return {**state, "sources": settled}

    def deal(self, parts: Sequence[Part], share: Share) -> State:
        begun = [(part, self.reader(part.state)) for part in parts]
        saved = [one for _, one in begun if one]
        states = []
        for number, source in enumerate(self.sources):
            below = [part._replace(state=one.items("sources", kind=dict)[number] if one else None)
                     for part, one in begun]  # fmt: skip
            states.append(source.deal(below, share))
        held = saved[share.index % len(saved)].any("credits") if saved else [0] * len(self.sources)
        ended = all(one.flag("ended") if one else part.ended for part, one in begun)
        return {"sources": states, "credits": held, "ended": ended}

    def describe(self, *, pinned: bool) -> str:
        return f"interleave({', '.join(map(repr, self.weights))})"


class _InterleaveIterator(StreamIterator[Any]):
    def __init__(
        self, iterators: list[StreamIterator[Any]], turns: WeightedRoundRobin, saved: StateReader | None
    ) -> None:
        super().__init__()
        self._iterators = iterators
        self._turns = turns
        self._ended = saved.flag("ended") if saved else False
        if saved:
            turns.held = saved.items("credits", length=len(iterators), kind=int)
            if sum(turns.held) or max(map(abs, turns.held)) > turns.period:
                raise saved.wrong("credits", f"credits whose sum is 0, of at most {turns.period}")

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
        return _ConcatIterator(self, context, self.reader(state))

    def settle(self, context: PipelineContext, state: State) -> State:
        saved = StateReader(self.describe(pinned=False), state)
        index = saved.integer("index", high=len(self.sources) - 1)
        later = {key: self.sources[int(key)].settle(context, one) for key, one in saved.numbered("later").items()}
        return {**state, "source": self.sources[index].settle(context, saved.child()), "later": later}

    def deal(self, parts: Sequence[Part], share: Share) -> State:
        """Former ranks that were further than others leave their states of later sources."""
        begun = [(part, self.reader(part.state)) for part in parts]
        places = [one.integer("index", high=len(self.sources) - 1) if one else 0 for _, one in begun]
        first = min((place for place, part in zip(places, parts, strict=True) if not part.ended), default=0)
        last = max([*places, *(number for _, one in begun if one for number in one.numbered("later"))])
        states = {}
        for number in range(first, last + 1):
            below = []
            for place, (part, one) in zip(places, begun, strict=True):
                own = one.child() if one and place == number else one.numbered("later").get(number) if one else None
                below.append(Part(part.share, own, part.ended or number < place))
            states[str(number)] = self.sources[number].deal(below, share)
        counts = dealt_counts([one for _, one in begun if one], share)
        return {"index": first, "source": states.pop(str(first)), "later": states, "counts": counts}

    def describe(self, *, pinned: bool) -> str:
        return f"concat({len(self.sources)})"


class _ConcatIterator(StreamIterator[Any]):
    def __init__(self, transform: Concat, context: PipelineContext, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._index = saved.integer("index", high=len(transform.sources) - 1) if saved else 0
        self._later = saved.numbered("later") if saved else {}  # states of sources after this one that were begun
        self.source: StreamIterator[Any] = transform.sources[self._index].open(
            context, saved.child() if saved else None
        )
        self.counts = saved.counts() if saved else {}  # of the sources before this one

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
            self.source = self._transform.sources[self._index].open(self._context, self._later.pop(self._index, None))

    def state(self) -> State:
        later = {str(number): state for number, state in self._later.items()}
        return {"index": self._index, "source": self.source.state(), "later": later, "counts": dict(self.counts)}
