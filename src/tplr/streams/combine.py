"""Combines several pipelines: one after the other, or interleaved by weight."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from tplr.errors import DataError
from tplr.sharding import Share
from tplr.streams.iterator import Part, PipelineContext, State, StreamIterator, Transform, divided_counts
from tplr.streams.round_robin import WeightedRoundRobin
from tplr.streams.state import StateReader

StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]


class Interleave(Transform):
    """Samples of all sources in the order of ``WeightedRoundRobin(weights)``.

    Args:
        strategy: behaviour when the source with the turn has no sample left, with the names of ``datasets``:
            ``first_exhausted``: iteration ends.
            ``all_exhausted``: the source restarts, until every source has ended once; then iteration ends.
            ``all_exhausted_without_replacement``: the source is removed, and the schedule of the others restarts;
            iteration ends after the last source. Every sample is returned once.
            Sources with weight 0 have no turn and do not count.

    Raises:
        ValueError: weights, number of sources or strategy are wrong.
    """

    def __init__(
        self, sources: Sequence[Transform], weights: Sequence[float] | None, strategy: StoppingStrategy
    ) -> None:
        self.sources = tuple(sources)
        self.weights = [1.0] * len(self.sources) if weights is None else [float(weight) for weight in weights]
        self.strategy: StoppingStrategy = strategy
        if strategy not in get_args(StoppingStrategy):
            raise ValueError(
                f"interleave_datasets: stopping_strategy: expected one of {', '.join(get_args(StoppingStrategy))}, "
                f"got {strategy!r}"
            )
        if not self.sources or len(self.weights) != len(self.sources):
            raise ValueError(
                f"interleave_datasets: expected one weight for each of 1 or more datasets, got "
                f"{len(self.sources)} datasets and {len(self.weights)} weights"
            )
        WeightedRoundRobin(self.weights)  # refuses wrong weights here rather than at the first sample

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _InterleaveIterator(self, context, self.reader(state))

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        states = StateReader(self.describe(pinned=False), state).items("sources", length=len(self.sources), kind=dict)
        states = [source.without_read_ahead(context, one) for source, one in zip(self.sources, states, strict=True)]
        return {**state, "sources": states}

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        """See ``Transform``. A source is exhausted if it was exhausted on all former ranks."""
        begun = [(part, self.reader(part.state)) for part in parts]
        saved = [one for _, one in begun if one]
        count = len(self.sources)
        states = []
        for number, source in enumerate(self.sources):
            below = [
                part._replace(state=one.items("sources", length=count, kind=dict)[number] if one else None)
                for part, one in begun
            ]
            states.append(source.divide(below, share))
        flags = [
            one.items("exhausted", length=count, kind=bool) if one else [part.ended] * count for part, one in begun
        ]
        exhausted = [all(flag) for flag in zip(*flags, strict=True)]
        alike = [one.any("credits") for one in saved if one.any("exhausted") == exhausted]  # of the same schedule
        return {
            "sources": states,
            "credits": alike[share.index % len(alike)] if alike else [0] * count,
            "exhausted": exhausted,
            "counts": divided_counts(saved, share),
        }

    def describe(self, *, pinned: bool) -> str:
        strategy = "" if self.strategy == "first_exhausted" else f", {self.strategy}"
        return f"interleave({', '.join(map(repr, self.weights))}{strategy})"


class _InterleaveIterator(StreamIterator[Any]):
    def __init__(self, transform: Interleave, context: PipelineContext, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        count = len(transform.sources)
        states = saved.items("sources", length=count, kind=dict) if saved else [None] * count
        self._exhausted = saved.items("exhausted", length=count, kind=bool) if saved else [False] * count
        self._repeated: int | None = None  # source that has restarted but returned no sample yet
        self._turns = self._schedule()
        if saved:
            self._turns.held = saved.items("credits", length=count, kind=int)
            if sum(self._turns.held) or max(map(abs, self._turns.held)) > self._turns.period:
                raise saved.wrong("credits", f"credits whose sum is 0, of at most {self._turns.period}")
            self.counts = saved.counts()  # of earlier passes over the sources
        self._iterators: list[StreamIterator[Any]] = []
        try:
            for source, one in zip(transform.sources, states, strict=True):
                self._iterators.append(source.open(context, one))
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Any:
        while not self._ended():
            before = self._turns.held
            index = self._turns.next()
            try:
                sample = next(self._iterators[index])
            except StopIteration:
                self._turns.held = before
                self._exhaust(index)
            except BaseException:
                self._turns.held = before  # the next call reads the same source
                raise
            else:
                self._repeated = None
                return sample
        raise StopIteration

    def state(self) -> State:
        return {
            "sources": [iterator.state() for iterator in self._iterators],
            "credits": self._turns.held,
            "exhausted": list(self._exhausted),
            "counts": dict(self.counts),
        }

    def sources(self) -> list[StreamIterator[Any]]:
        return self._iterators

    def _ended(self) -> bool:
        if self._transform.strategy == "first_exhausted":
            return any(self._exhausted)
        return all(done or not weight for done, weight in zip(self._exhausted, self._transform.weights, strict=True))

    def _schedule(self) -> WeightedRoundRobin:
        weights = self._transform.weights
        if self._transform.strategy == "all_exhausted_without_replacement" and not self._ended():
            weights = [0.0 if done else weight for done, weight in zip(self._exhausted, weights, strict=True)]
        return WeightedRoundRobin(weights)

    def _exhaust(self, index: int) -> None:
        self._exhausted[index] = True
        if self._ended():
            return
        if self._transform.strategy == "all_exhausted_without_replacement":
            self._turns = self._schedule()
            return
        if self._repeated == index:
            raise DataError(f"interleave_datasets: dataset {index} is empty and can't be repeated")
        ended = self._iterators[index]
        self._iterators[index] = self._transform.sources[index].open(self._context)  # if it fails, the next call tries
        self._repeated = index
        ended.close()
        for name, count in ended.report().items():
            self.counts[name] = self.counts.get(name, 0) + count


class Concat(Transform):
    """All samples of the first source, then those of the next; a source is opened when the previous one ends."""

    def __init__(self, sources: Sequence[Transform]) -> None:
        if not sources:
            raise ValueError("concat_datasets: expected one dataset or more, got none")
        self.sources = tuple(sources)

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _ConcatIterator(self, context, self.reader(state))

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        saved = StateReader(self.describe(pinned=False), state)
        index = saved.integer("index", high=len(self.sources) - 1)
        later = {
            str(key): self.sources[key].without_read_ahead(context, one)
            for key, one in saved.numbered("later", high=len(self.sources) - 1).items()
        }
        return {**state, "source": self.sources[index].without_read_ahead(context, saved.child()), "later": later}

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        """See ``Transform``. Former ranks that were ahead of others contribute their states of later sources."""
        begun = [(part, self.reader(part.state)) for part in parts]
        places = [one.integer("index", high=len(self.sources) - 1) if one else 0 for _, one in begun]
        first = min((place for place, part in zip(places, parts, strict=True) if not part.ended), default=0)
        last = max(
            [
                *places,
                *(number for _, one in begun if one for number in one.numbered("later", high=len(self.sources) - 1)),
                *(len(self.sources) - 1 for part in parts if part.ended),  # they have read all sources
            ]
        )
        states = {}
        for number in range(first, last + 1):
            below = []
            for place, (part, one) in zip(places, begun, strict=True):
                own = (
                    one.child()
                    if one and place == number
                    else one.numbered("later", high=len(self.sources) - 1).get(number)
                    if one
                    else None
                )
                below.append(Part(part.share, own, part.ended or number < place))
            states[str(number)] = self.sources[number].divide(below, share)
        counts = divided_counts([one for _, one in begun if one], share)
        return {"index": first, "source": states.pop(str(first)), "later": states, "counts": counts}

    def describe(self, *, pinned: bool) -> str:
        return f"concat({len(self.sources)})"


class _ConcatIterator(StreamIterator[Any]):
    def __init__(self, transform: Concat, context: PipelineContext, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._index = saved.integer("index", high=len(transform.sources) - 1) if saved else 0
        # States of sources after this one that were begun, on a former rank that was further than others.
        self._later = saved.numbered("later", high=len(transform.sources) - 1) if saved else {}
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
            index = self._index + 1
            following = self._transform.sources[index].open(self._context, self._later.get(index))
            self.source.close()  # only now: if the next source can't be opened, the next call tries again
            self.counts = self.report()
            self._later.pop(index, None)
            self._index, self.source = index, following

    def state(self) -> State:
        later = {str(number): state for number, state in self._later.items()}
        return {"index": self._index, "source": self.source.state(), "later": later, "counts": dict(self.counts)}
