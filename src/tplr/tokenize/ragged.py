"""Ragged array: rows of different lengths, stored one after another in one array."""

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
        """Copies separate rows into one array."""
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
        """int64 (rows,): tokens of each row."""
        return np.diff(self.offsets)

    def replaced(self, indices: Sequence[int], by: "Ragged") -> "Ragged":
        """A copy in which row ``indices[i]`` is row ``i`` of ``by``."""
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
    """int64 (rows + 1,): the offsets of rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
