"""StreamIterator: one pass over items whose position can be saved. Transform: the configuration of such passes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# JSON values, numpy arrays and samples of them; what state.seal can write down.
State = dict[str, Any]


class StreamIterator(ABC, Generic[T]):
    """An iterator with a position: the number of items *returned*, however many were read ahead.

    A subclass implements ``items`` or ``__next__``. ``items`` is a generator, because a chain of generators takes a
    fraction of the time of a chain of ``__next__`` methods.

    Attributes:
        source: the iterator that this one reads, if it reads one.
        arrays: token columns may be numpy arrays; see ``use_arrays``.
        arrays_for_tensors: with ``arrays`` it returns arrays exactly where it returns tensors without.
        counts: number of skipped or dropped things so far, by name; part of the state, so it survives a resume.
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
        """The next item; StopIteration at the end, and again after it. After an error the next call continues."""
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
        """The items from the position on, until the end or an error; only the last such iterator may be used.

        A generator of a subclass keeps the position in attributes, not in local variables: whenever it has yielded or
        raised, ``state`` gives the position, and another generator continues there.
        """
        return self

    @abstractmethod
    def state(self) -> State:
        """The position. May share objects with the iterator: copy it before the next call."""

    def use_arrays(self) -> None:
        """Before the first item: for a reader that would convert tensors to arrays."""
        self.arrays = True

    def sources(self) -> "list[StreamIterator[Any]]":
        """The iterators that this one reads; most have one, in ``source``."""
        return [] if self.source is None else [self.source]

    def report(self) -> dict[str, int]:
        """Sum of ``counts`` over this iterator and all its sources."""
        counts = dict(self.counts)
        for source in self.sources():
            for name, count in source.report().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def close(self) -> None:
        """Release threads, processes and connections; idempotent. Items that were returned stay valid."""
        for source in self.sources():
            source.close()


class PassingIterator(StreamIterator[T]):
    """Returns the samples of its source, or some columns of them, as they are: arrays stay arrays."""

    def __init__(self, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self.arrays_for_tensors = source.arrays_for_tensors

    def use_arrays(self) -> None:
        super().use_arrays()
        self.source.use_arrays()


class PipelineContext:
    """Resources that all iterators of one pass share, such as connections."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._shared: dict[Callable[..., Any], Any] = {}

    def retries(self) -> int:
        """Number of retries of the shared resources."""
        return sum(getattr(part, "retries", 0) for part in self._shared.values())

    def shared(self, make: Callable[[], AbstractContextManager[R]]) -> R:
        """The value of the context manager ``make()``: entered at the first call, left by ``close``."""
        if make not in self._shared:
            self._shared[make] = self._stack.enter_context(make())
        return self._shared[make]

    def close(self) -> None:
        self._stack.close()


class Transform(ABC):
    """A source, or what is done to the samples of one: immutable configuration, for any number of passes.

    Attributes:
        sources: the transforms that it reads.
        carries: whether its iterator holds data of one rank only, such as leftover tokens or a count.
        iterator: makes the iterator of a transform of one source, whose state is ``"source"`` in the iterator's own.
    """

    sources: "tuple[Transform, ...]" = ()
    carries: bool = True
    iterator: "Callable[[Any, StreamIterator[Any], State | None], StreamIterator[Any]]"

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        """Start a pass at the beginning, or at a ``state`` of an equal transform; does not change ``state``.

        Raises:
            StateError: the state does not fit.
        """
        source = self.sources[0].open(context, state["source"] if state else None)
        return self.iterator(self, source, state)

    @abstractmethod
    def describe(self, *, pinned: bool) -> str:
        """One line, equal for transforms whose states are interchangeable.

        Args:
            pinned: a later transform carries data of one rank, so the line must name the rank.
        """

    def pipeline(self, *, pinned: bool = False) -> list[str]:
        """The lines of all transforms, sources first."""
        below = [line for transform in self.sources for line in transform.pipeline(pinned=pinned or self.carries)]
        return [*below, self.describe(pinned=pinned)]
