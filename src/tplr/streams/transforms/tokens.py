"""One-dimensional token columns: checks and conversions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.streams.state import smallest
from tplr.token_buffer import Tokens

Columns = dict[str, Tokens]


def token_array(value: Any, column: str = "input_ids") -> Tokens:
    """Convert tokens to one-dimensional int64: an integer, a list of integers, an integer array or tensor, also of
    shape ``(1, n)``; None has no tokens. May share memory with ``value``.

    Raises:
        ValueError: it is anything else, such as floats or several rows.
    """
    if type(value) is np.ndarray and value.dtype == np.int64 and value.ndim == 1:
        return value
    if value is None:
        return np.empty(0, np.int64)
    if isinstance(value, bool | np.bool_):
        raise _not_tokens(value, column)
    if isinstance(value, int | np.integer):
        if not -(2**63) <= value < 2**63:
            raise _not_tokens(value, column)
        return np.array([value], np.int64)
    if type(value) is list and not value:
        return np.empty(0, np.int64)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_tokens(value, column) from error
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _not_tokens(value, column)
    return array.astype(np.int64, copy=False)


def token_columns(sample: Mapping[str, Any], columns: Sequence[str]) -> tuple[Columns, int]:
    """Return the token arrays of some columns and their common length.

    Raises:
        KeyError: a column is missing.
        ValueError: a column holds no tokens, or the lengths differ.
    """
    arrays = {}
    for column in columns:
        if column not in sample:
            raise KeyError(f"the sample has no column {column!r}; it has {sorted(map(str, sample))}")
        arrays[column] = token_array(sample[column], column)
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        told = ", ".join(f"{column}: {len(array)}" for column, array in arrays.items())
        raise ValueError(f"the token columns of one sample differ in length: {told}")
    return arrays, lengths.pop()


def tensors(columns: Columns) -> dict[str, Any]:
    """Return the columns as ``torch.long`` tensors that share their memory."""
    import torch

    return {column: torch.from_numpy(array) for column, array in columns.items()}


def with_tensors(sample: dict[str, Any]) -> dict[str, Any]:
    """Return ``sample`` with its arrays replaced by tensors that share their memory."""
    import torch

    return {column: torch.from_numpy(value) if type(value) is np.ndarray else value for column, value in sample.items()}


def narrowed(columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """Return the same numbers, each column in the smallest dtype that holds it."""
    return {column: array.astype(smallest([array])) for column, array in columns.items()}


class NarrowColumns:
    """Stores token arrays with two bytes per token while a column's tokens fit, then with four or eight."""

    def __init__(self) -> None:
        self._dtypes: dict[str, np.dtype[Any]] = {}  # of columns that do not fit two bytes
        self._unified: dict[str, np.dtype[Any]] = {}  # those at the last ``unify``

    def narrow(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return ``sample`` with narrowed token arrays; other values do not change."""
        return {
            column: self._narrowed(column, value) if type(value) is np.ndarray else value
            for column, value in sample.items()
        }

    def widen(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {
            column: value.astype(np.int64) if type(value) is np.ndarray else value for column, value in sample.items()
        }

    def unify(self, samples: list[dict[str, Any]]) -> None:
        """Replace the samples in a list by samples with one dtype for each column, if a later sample needed a larger
        one."""
        if self._unified == self._dtypes:
            return
        samples[:] = [
            {
                column: value.astype(self._dtypes.get(column, _TWO_BYTES), copy=False)
                if type(value) is np.ndarray
                else value
                for column, value in sample.items()
            }
            for sample in samples
        ]
        self._unified = dict(self._dtypes)

    def _narrowed(self, column: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if column not in self._dtypes:
            if array.dtype == _TWO_BYTES:
                return array
            bits = np.bitwise_or.reduce(array)  # below 2**16 only if each number is, and none is negative
            if 0 <= bits < 2**16:
                return array.astype(_TWO_BYTES)
        dtype = np.promote_types(smallest([array]), self._dtypes.get(column, _TWO_BYTES))
        self._dtypes[column] = dtype
        return array.astype(dtype, copy=False)


_TWO_BYTES = np.dtype(np.uint16)


def _not_tokens(value: Any, column: str) -> ValueError:
    shape = getattr(value, "shape", None)
    kind = f"{type(value).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"
    dtype = getattr(value, "dtype", None)
    return ValueError(
        f"column {column!r}: expected one row of integer tokens, got {kind}{'' if dtype is None else f', {dtype}'}"
    )
