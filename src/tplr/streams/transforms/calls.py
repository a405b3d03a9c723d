"""map, filter and filter_map: call a user function for each sample."""

import copy
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

from tplr.streams.iterator import State, StreamIterator, Transform
from tplr.streams.state import StateReader

CallKind = Literal["map", "filter", "filter_map"]


def outcome(kind: CallKind, sample: Any, answer: Any) -> Any:
    """Return the resulting sample; None if it is filtered out.

    Raises:
        ValueError: the function of a map returned None, which would drop the sample.
    """
    if kind == "filter":
        return sample if answer else None
    if answer is None and kind == "map":
        fail(
            kind,
            sample,
            ValueError("map's function returned None; return the sample, or use filter_map to leave samples out"),
        )
    return answer


def fail(kind: CallKind, sample: Any, error: Exception) -> NoReturn:
    """Raise the function's error with a note that names the sample.

    Raises:
        RuntimeError: the function raised StopIteration, which would end the data.
    """
    note = f"{kind} failed for the sample {reprlib.repr(sample)}"
    if isinstance(error, StopIteration):
        ended = RuntimeError(f"{kind}'s function raised StopIteration")
        ended.add_note(note)
        raise ended from error
    error.add_note(note)
    raise error


class _CallIterator(StreamIterator[Any]):
    def __init__(self, transform: "Call", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._kind: CallKind = transform.kind
        self._function = transform.function

    def items(self) -> Iterator[Any]:
        kind, function = self._kind, self._function
        filters = kind == "filter"
        for sample in self.source.items():
            try:
                # A list or a state may hold the sample, to be read again. dict.copy takes a third of copy.copy's time.
                answer = function(sample.copy() if type(sample) is dict else copy.copy(sample))
            except Exception as error:  # noqa: BLE001 - raised
                fail(kind, sample, error)
            if filters:
                if answer:
                    yield sample
            elif answer is not None:
                yield answer
            else:
                outcome(kind, sample, answer)

    def state(self) -> State:
        return self.source.state()


class Call(Transform):
    """Calls ``function`` with a shallow copy of each sample, in the caller's thread. A filter returns the samples
    themselves."""

    iterator = _CallIterator
    keeps = False

    def __init__(self, source: Transform, kind: CallKind, function: Callable[[Any], Any]) -> None:
        self.sources = (source,)
        self.kind: CallKind = kind
        self.function = function
        # map keeps ranks aligned; filters drop a different number of samples on each rank.
        self.carries = kind != "map"

    def describe(self, *, pinned: bool) -> str:
        return self.kind
