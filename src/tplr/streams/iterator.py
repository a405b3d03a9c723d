"""StreamIterator: one pass over items whose position can be saved. Transform: the configuration of such passes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, NamedTuple, Self, TypeVar

from tplr.errors import StateError
from tplr.sharding import Share
from tplr.streams.state import StateReader

T = TypeVar("T")
R = TypeVar("R")

# JSON values, numpy arrays and samples of them; what state.seal can write down.
State = dict[str, Any]


class StreamIterator(ABC, Generic[T]):
    """An iterator with a position: the number of items *returned*, regardless of read-ahead.

    A subclass implements ``items`` or ``__next__``. ``items`` is a generator, because a chain of generators takes a
    fraction of the time of a chain of ``__next__`` methods.

    Attributes:
        source: the iterator that this one reads, if it reads one.
        arrays: token columns may be numpy arrays; see ``use_arrays``.
        arrays_for_tensors: with ``arrays``, it returns arrays exactly where it otherwise returns tensors.
        counts: number of skipped or dropped items so far, by name; part of the state, so it survives a resume.
    """

    arrays: bool = False
    arrays_for_tensors: bool = False

    def __init__(self, source: Any = None) -> None:
        self.source = source
        self.counts: dict[str, int] = {}
        self._running: Iterator[T] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next item; raise StopIteration at the end and after it. After an error the next call continues."""
        if self._running is None:
            self._running = self.items()
        try:
            return next(self._running)
        except StopIteration:
            raise
        except BaseException:
            self._running = None  # an error ends a generator
            raise

    def items(self) -> Iterator[T]:
        """Yield the items from the position on, until the end or an error; only the newest iterator may be used.

        A generator of a subclass keeps the position in attributes, not in local variables: whenever it has yielded or
        raised, ``state`` gives the position, and another generator continues there.
        """
        return self

    @abstractmethod
    def state(self) -> State:
        """Return the position. It may share objects with the iterator: copy it before the next call."""

    def copied_values(self) -> int:
        """Return about how many values ``state`` copies, such as the samples of a shuffle's buffer; 0 if they are
        few."""
        return sum(source.copied_values() for source in self.sources())

    def use_arrays(self) -> None:
        """Return arrays instead of tensors, for a reader that would convert them; call before the first item."""
        self.arrays = True

    def sources(self) -> "list[StreamIterator[Any]]":
        """Return the iterators that this one reads; most read one, ``source``."""
        return [] if self.source is None else [self.source]

    def report(self) -> dict[str, int]:
        """Return the sum of ``counts`` over this iterator and all its sources."""
        counts = dict(self.counts)
        for source in self.sources():
            for name, count in source.report().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def close(self) -> None:
        """Release threads, processes and connections; idempotent. Returned items stay valid."""
        for source in self.sources():
            source.close()


class PassingIterator(StreamIterator[T]):
    """Returns the samples of its source, or some of their columns, unchanged: arrays stay arrays."""

    def __init__(self, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self.arrays_for_tensors = source.arrays_for_tensors

    def use_arrays(self) -> None:
        super().use_arrays()
        self.source.use_arrays()


class PipelineContext:
    """Resources that all iterators of one pass share, such as connections.

    Attributes:
        share: the part of the data that sources read, if the pipeline has a ``shard_by_rank``.
    """

    def __init__(self, share: Share | None = None) -> None:
        self.share = share
        self._stack = ExitStack()
        self._shared: dict[Callable[..., Any], Any] = {}

    def retries(self) -> int:
        """Number of retries of the shared resources."""
        return sum(getattr(part, "retries", 0) for part in self._shared.values())

    def shared(self, make: Callable[[], AbstractContextManager[R]]) -> R:
        """Return the value of the context manager ``make()``, entered at the first call and exited by ``close``."""
        if make not in self._shared:
            self._shared[make] = self._stack.enter_context(make())
        return self._shared[make]

    def close(self) -> None:
        self._stack.close()


class Part(NamedTuple):
    """The position of one of several ranks in a transform: ``state``, None at the beginning, or ``ended``."""

    share: Share
    state: State | None
    ended: bool = False


class Transform(ABC):
    """A source or an operation on its samples: immutable configuration for any number of passes.

    A state resumes on another number of ranks in two steps. ``without_read_ahead`` replaces the state of each rank by
    one without read-ahead. ``divide`` gives each of the new ranks its part of the remaining samples of all.

    Attributes:
        sources: the transforms that it reads.
        carries: whether its iterator holds data of one rank only, such as leftover tokens or a count.
        keeps: whether its iterator's state has more than ``"source"``; if not, its state is the source's state.
        divisible: whether ranks can share this source without reading each other's samples.
        iterator: creates the iterator of a transform with one source, whose state is ``"source"`` in the iterator's.
    """

    sources: "tuple[Transform, ...]" = ()
    carries: bool = True
    keeps: bool = True
    divisible: bool = True
    iterator: "Callable[[Any, StreamIterator[Any], StateReader | None], StreamIterator[Any]]"

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        """Start a pass at the beginning, or at a ``state`` of an equal transform; does not change ``state``.

        Raises:
            StateError: the state does not fit.
        """
        if not self.keeps:
            return self.iterator(self, self.sources[0].open(context, state), None)
        saved = self.reader(state)
        source = self.sources[0].open(context, saved.child() if saved else None)
        try:
            return self.iterator(self, source, saved)
        except BaseException:
            source.close()
            raise

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        """Return a state with the same position, without samples that a resume must read again and skip."""
        if not self.sources:
            return state
        if not self.keeps:
            return self.sources[0].without_read_ahead(context, state)
        source = StateReader(self.describe(pinned=False), state).child()
        return {**state, "source": self.sources[0].without_read_ahead(context, source)}

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        """Return the state of ``share`` for its part of the samples that ``parts``, all former ranks, have left.

        Each remaining sample belongs to exactly one share. The states are without read-ahead.

        Raises:
            StateError: this transform holds data of one rank that can't be divided.
        """
        if not self.keeps:
            return self.sources[0].divide(parts, share)
        begun = [(part, self.reader(part.state)) for part in parts]
        below = [part._replace(state=saved.child() if saved else None) for part, saved in begun]
        held = self.divide_held([saved for _, saved in begun if saved], share)
        return {"source": self.sources[0].divide(below, share), **held}

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        """Return the part of ``share`` in the data that the iterators of all ranks held themselves."""
        raise self.of_one_rank()

    def of_one_rank(self) -> StateError:
        return StateError(
            f"{self.describe(pinned=False)} holds something of one rank: these states fit the same number of ranks and "
            f"workers only"
        )

    def share(self) -> Share | None:
        """The share of the data that this process reads, if a ``shard_by_rank`` says so.

        Raises:
            ValueError: several sources have different shares.
        """
        shares = {source.share() for source in self.sources}
        if len(shares) > 1:
            raise ValueError(
                f"{self.describe(pinned=False)} joins datasets of different shares: use shard_by_rank on all of them, "
                f"or after joining them"
            )
        return shares.pop() if shares else None

    def has_fixed_order(self) -> bool:
        """Return whether all passes return the samples in the same order."""
        return all(source.has_fixed_order() for source in self.sources)

    def reader(self, state: State | None) -> StateReader | None:
        """Checked access to ``state``."""
        return None if state is None else StateReader(self.describe(pinned=False), state)

    @abstractmethod
    def describe(self, *, pinned: bool) -> str:
        """Return one line, equal for transforms whose states are interchangeable.

        Args:
            pinned: a later transform carries data of one rank, so the line must name the rank.
        """

    def pipeline(self, *, pinned: bool = False) -> list[str]:
        """Return the lines of all transforms, sources first."""
        below = [line for transform in self.sources for line in transform.pipeline(pinned=pinned or self.carries)]
        return [*below, self.describe(pinned=pinned)]


def divided_counts(saved: Sequence[StateReader], share: Share) -> dict[str, int]:
    """Return the sum of all ranks' counts for the first share; the others restart at zero."""
    counts: dict[str, int] = {}
    for one in saved if share.index == 0 else ():
        for name, count in one.counts().items():
            counts[name] = counts.get(name, 0) + count
    return counts


def divided_items(saved: Sequence[StateReader], key: str, share: Share) -> list[Any]:
    """Return one share's part of the lists that all ranks held under ``key``."""
    return share.of([item for one in saved for item in one.items(key)])
