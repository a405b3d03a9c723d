"""Flow: one pass over items whose position can be saved; Step: the configuration that begins such a pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# JSON values, numpy arrays and samples of them; what state.seal can write down.
State = dict[str, Any]


class StreamIterator(ABC, Generic[T]):
    """An iterator with a position: the number of items *delivered*, whatever was read ahead.

    Attributes:
        arrays_for_tensors: ``raw`` gives arrays just where ``next`` gives tensors.
        counts: what was left out or tried again so far, by name; part of the state, so it survives a resume.
    """

    arrays_for_tensors: bool = False
    source: Any = None

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> T:
        """The next item; StopIteration at the end, and again after it."""

    @abstractmethod
    def state(self) -> State:
        """Where this flow stands. May hold live objects: whoever keeps it copies it at once."""

    def raw(self) -> Any:
        """As ``next``, but columns of tokens may come as numpy arrays: for steps that would turn them into such."""
        return self.__next__()

    def sources(self) -> "list[StreamIterator[Any]]":
        """The flows that this one draws from; most have one, in ``source``."""
        return [] if self.source is None else [self.source]

    def report(self) -> dict[str, int]:
        """``counts`` of this flow and all below, added up."""
        counts = dict(self.counts)
        for source in self.sources():
            for name, count in source.report().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def close(self) -> None:
        """Give back what the flow holds; twice is fine. What was delivered stays valid."""
        for source in self.sources():
            source.close()


class PipelineContext:
    """What all flows of one pipeline share from its first item until it is closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._shared: dict[Callable[..., Any], Any] = {}

    def retries(self) -> int:
        """How often the shared parts asked again for what had failed."""
        return sum(getattr(part, "retries", 0) for part in self._shared.values())

    def shared(self, make: Callable[[], AbstractContextManager[R]]) -> R:
        """What ``make()`` gives, made at the first call and closed with the run."""
        if make not in self._shared:
            self._shared[make] = self._stack.enter_context(make())
        return self._shared[make]

    def close(self) -> None:
        self._stack.close()


class Transform(ABC):
    """A step of a pipeline: configuration only, never changed; any number of passes may begin from it.

    Attributes:
        sources: the steps it draws from.
        carries: whether its flow holds something that belongs to one rank only (a rest of tokens, a count).
    """

    sources: "tuple[Transform, ...]" = ()
    carries: bool = True

    @abstractmethod
    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        """Begin a pass at the start, or where ``state``, of an equal step, was taken. ``state`` is not changed.

        Raises:
            StateError: it does not fit.
        """

    @abstractmethod
    def describe(self, *, pinned: bool) -> str:
        """One line, equal for steps whose states are interchangeable.

        Args:
            pinned: a later step carries something of one rank, so which rank this is has to be told as well.
        """

    def pipeline(self, *, pinned: bool = False) -> list[str]:
        """The lines of all steps, sources first."""
        below = [line for transform in self.sources for line in transform.pipeline(pinned=pinned or self.carries)]
        return [*below, self.describe(pinned=pinned)]
