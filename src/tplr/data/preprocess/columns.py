"""Columns of records: made, put together, taken apart. (See ``store.writer.Column``.)"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.data.store.writer import Column

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


def column(records: Sequence[Sequence[Array]], *, nested: bool, dtype: str) -> Column:
    """From the lists of each record; without ``nested`` each has one."""
    lists = [part for record in records for part in record]
    values = np.concatenate([np.empty(0, dtype), *lists]).astype(dtype, copy=False)
    return Column(values, cuts(map(len, lists)), cuts(map(len, records)) if nested else None)


def join(columns: Sequence[Column]) -> Column:
    """The records of all, in order; at least one column."""
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
    if source.groups is None:
        values, offsets = _gather(source.offsets, records)
        return Column(source.values[values], offsets)
    lists, groups = _gather(source.groups, records)
    values, offsets = _gather(source.offsets, lists)
    return Column(source.values[values], offsets, groups)


def cuts(lengths: Any) -> Indices:
    """Where parts of these lengths begin, and where the last one ends."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def _gather(offsets: Indices, parts: Indices) -> tuple[Indices, Indices]:
    """Places of the elements of some parts, one part after another, and where the parts begin then."""
    starts, lengths = offsets[parts], offsets[parts + 1] - offsets[parts]
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(begins[-1]) - np.repeat(begins[:-1] - starts, lengths), begins
