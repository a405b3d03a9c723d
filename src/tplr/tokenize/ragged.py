"""Rows of different lengths in one array."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Ragged(NamedTuple):
    """Row ``i`` is ``ids[offsets[i] : offsets[i + 1]]``.

    Attributes:
        ids: int32 (tokens,), all rows one after another.
        offsets: int64 (rows + 1,), ascending from 0 to ``len(ids)``.
    """

    ids: Ids
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Ids]) -> Self:
        """From separate rows."""
        ids = np.concatenate([np.empty(0, np.int32), *(np.asarray(row, np.int32) for row in rows)])
        return cls(ids, offsets_of([len(row) for row in rows]))

    @classmethod
    def join(cls, parts: Iterable["Ragged"]) -> Self:
        """The rows of all parts in order."""
        parts = list(parts)
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return cls(np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]), offsets_of(lengths))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def replaced(self, indices: Sequence[int], by: "Ragged") -> "Ragged":
        """With row ``indices[i]`` replaced by row ``i`` of ``by``."""
        if not len(indices):
            return self
        rows = [*self.rows()]
        for i, row in zip(indices, by.rows(), strict=True):
            rows[i] = row
        return Ragged.of(rows)

    def rows(self) -> Iterator[Ids]:
        """Each row, as a view."""
        return (self.ids[start:stop] for start, stop in zip(self.offsets, self.offsets[1:], strict=False))


def offsets_of(lengths: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where rows of these lengths begin, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def framed(rows: Ragged, before: Ids, after: Ids, max_length: int | None) -> Ragged:
    """``before`` + row + ``after`` for each row; where that is longer than ``max_length``, the row's end is cut off."""
    room = None if max_length is None else max(max_length - len(before) - len(after), 0)
    lengths = rows.lengths
    if room is not None and len(lengths) and lengths.max() > room:
        kept = np.minimum(lengths, room)
        place = np.arange(len(rows.ids)) - np.repeat(rows.offsets[:-1], lengths)
        rows, lengths = Ragged(rows.ids[place < room], offsets_of(kept)), kept
    if not len(before) and not len(after):
        return rows
    framed_offsets = offsets_of(lengths + len(before) + len(after))
    ids = np.empty(framed_offsets[-1], np.int32)
    inside = np.ones(len(ids), bool)
    for i, token in enumerate(before):
        ids[framed_offsets[:-1] + i] = token
        inside[framed_offsets[:-1] + i] = False
    for i, token in enumerate(after[::-1], 1):
        ids[framed_offsets[1:] - i] = token
        inside[framed_offsets[1:] - i] = False
    ids[inside] = rows.ids
    return Ragged(ids, framed_offsets)
