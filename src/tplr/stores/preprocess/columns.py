"""Builds, joins and selects columns of records (``stores.writer.Column``)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.stores.writer import Column

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


def column(records: Sequence[Sequence[Array]], *, nested: bool, dtype: str) -> Column:
    """A column from the lists of each record; without ``nested`` each record has one list."""
    lists = [part for record in records for part in record]
    values = np.concatenate([np.empty(0, dtype), *lists]).astype(dtype, copy=False)
    return Column(values, cuts(map(len, lists)), cuts(map(len, records)) if nested else None)


def join(columns: Sequence[Column]) -> Column:
    """One column with the records of all, in order; at least one column."""
    if len(columns) == 1:
        return columns[0]
    groups = [one.groups for one in columns if one.groups is not None]
    return Column(
        np.concatenate([one.values for one in columns]),
        cuts(np.concatenate([np.diff(one.offsets) for one in columns])),
        cuts(np.concatenate([np.diff(one) for one in groups])) if groups else None,
    )


def take(source: Column, records: Indices) -> Column:
    """Some records, in the order given."""
    groups, lists = None, records
    if source.groups is not None:
        starts, lengths = source.groups[records], source.groups[records + 1] - source.groups[records]
        groups, lists = cuts(lengths), slices(np.arange(len(source.offsets) - 1), starts, lengths)
    starts, lengths = source.offsets[lists], source.offsets[lists + 1] - source.offsets[lists]
    return Column(slices(source.values, starts, lengths), cuts(lengths), groups)


def cuts(lengths: Iterable[int] | Indices) -> Indices:
    """The starts of parts of these lengths, then the end of the last."""
    given = lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(given, dtype=np.int64)])


def sums(values: Array, offsets: Indices) -> Indices:
    """The sum of each part of ``values``; a part may be empty."""
    return np.diff(cuts(values)[offsets])


def slices(values: Array, starts: Indices, lengths: Indices) -> Array:
    """Concatenates slices of an array, which is many times faster than indexing."""
    ends = (starts + lengths).tolist()
    parts = [values[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
    return np.concatenate([np.empty(0, values.dtype), *parts])
