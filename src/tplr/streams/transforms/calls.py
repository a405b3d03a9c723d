"""map, filter and filter_map: call a function of the user for each sample."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform

CallKind = Literal["map", "filter", "filter_map"]


def checked(kind: CallKind, call: Callable[[], Any]) -> Any:
    """The result of ``call``.

    Raises:
        ValueError: the function of a map returned None, which would drop the sample.
        RuntimeError: the function raised StopIteration, which would end the data.
    """
    try:
        answer = call()
    except StopIteration as error:
        raise RuntimeError(f"{kind}'s function raised StopIteration") from error
    if kind == "map" and answer is None:
        raise ValueError("map's function returned None; return the sample, or use filter_map to leave samples out")
    return answer


def outcome(kind: CallKind, sample: Any, answer: Any) -> Any:
    """The resulting sample; None if it is filtered out."""
    if kind == "filter":
        return sample if answer else None
    return answer


class Call(Transform):
    """Calls ``function`` in the caller's thread."""

    def __init__(self, source: Transform, kind: CallKind, function: Callable[[Any], Any]) -> None:
        self.sources = (source,)
        self.kind: CallKind = kind
        self.function = function
        # map keeps ranks aligned; filters drop a different number of samples on each rank.
        self.carries = kind != "map"

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _CallIterator(self, self.sources[0].open(context, state))

    def describe(self, *, pinned: bool) -> str:
        return self.kind


class _CallIterator(StreamIterator[Any]):
    def __init__(self, transform: Call, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self._kind: CallKind = transform.kind
        self._function = transform.function

    def __next__(self) -> Any:
        while True:
            sample = next(self.source)
            answer = outcome(self._kind, sample, checked(self._kind, partial(self._function, sample)))
            if answer is not None:
                return answer

    def state(self) -> State:
        return self.source.state()
