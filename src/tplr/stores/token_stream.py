"""One key of a store: segments that are read as one stream of numbers, and the positions of records in it."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from tplr.errors import DataError

Array = npt.NDArray[Any]


class Segment(Protocol):
    """A part of a stream: a flat array, or an object that reads one from elsewhere."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Array: ...


class SegmentRange(NamedTuple):
    """Elements ``[begin, end)`` of a segment."""

    segment: Segment
    begin: int
    end: int


class TokenStream:
    """Segments, one after another. ``read`` copies only if a range spans several."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """``segments`` share a dtype; at least one."""
        # Empty segments would make the search in ``_ends`` ambiguous.
        self._segments = [segment for segment in segments if len(segment)] or [segments[0]]
        self._ends = list(accumulate(map(len, self._segments)))
        self._only = self._segments[0] if len(self._segments) == 1 else None
        self.dtype = segments[0].dtype

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, begin: int, end: int) -> Array:
        """Elements ``[begin, end)`` for ``0 <= begin <= end <= len``."""
        if self._only is not None:
            return self._only[begin:end]
        parts = [part.segment[part.begin : part.end] for part in self.parts(begin, end)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def parts(self, begin: int, end: int) -> Iterator[SegmentRange]:
        """The segments that ``[begin, end)`` spans, and the range within each."""
        number = bisect_right(self._ends, begin)
        while begin < end:
            segment, stop = self._segments[number], self._ends[number]
            first = stop - len(segment)
            yield SegmentRange(segment, begin - first, min(end, stop) - first)
            begin, number = stop, number + 1


class RecordOffsets:
    """The positions of a key's records in its stream.

    Args:
        offsets: start of each list, then the end of the last.
        groups: the same for the lists of each record, counted in lists; None if a record is one list.
    """

    def __init__(self, offsets: npt.NDArray[np.int64], groups: npt.NDArray[np.int64] | None) -> None:
        self._offsets = offsets
        self._groups = groups

    def __len__(self) -> int:
        return len(self._offsets if self._groups is None else self._groups) - 1

    @property
    def nested(self) -> bool:
        """Whether a record is a list of lists."""
        return self._groups is not None

    def ranges(self, record: int) -> list[tuple[int, int]]:
        """``[begin, end)`` of each list of a record."""
        first, stop = (record, record + 1) if self._groups is None else self._groups[record : record + 2].tolist()
        cuts = cast("list[int]", self._offsets[first : stop + 1].tolist())
        return [*pairwise(cuts)]


def token_ids(values: Array, key: str, item: int) -> npt.NDArray[np.int64]:
    """Copy the numbers of an item as int64. Raises DataError for a number that is not whole, such as 3.7."""
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    with np.errstate(invalid="ignore"):
        ids = values.astype(np.int64)
    if len(wrong := values[ids != values]):
        raise DataError(f"item {item}: its {key!r} holds {wrong[0]!s}, expected whole numbers: prepare the store again")
    return ids


def mask(values: Array, key: str, item: int) -> npt.NDArray[np.bool_]:
    """Copy the mask of an item as bool. Raises DataError for a number that is neither 0 nor 1, such as 0.5."""
    if values.dtype.kind != "b" and len(wrong := values[(values != 0) & (values != 1)]):
        raise DataError(f"item {item}: its {key!r} holds {wrong[0]!s}, expected 0 or 1: prepare the store again")
    return values.astype(np.bool_)


def join_offsets(parts: Sequence[tuple[Sequence[int], Sequence[int] | None]]) -> RecordOffsets:
    """Join the records of several shards to one sequence; each part is a shard's ``(offsets, groups)``."""
    offsets = _shifted([offsets for offsets, _ in parts])
    nested = [groups for _, groups in parts if groups is not None]
    return RecordOffsets(offsets, _shifted(nested) if nested else None)


def _shifted(parts: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    whole, last = [np.zeros(1, np.int64)], 0
    for part in parts:
        whole.append(np.asarray(part[1:], np.int64) + last)
        last = int(whole[-1][-1]) if len(part) > 1 else last
    return np.concatenate(whole)
