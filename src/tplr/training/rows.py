"""Rows of a model's tensors, in memory or on disk: what needs some of them reads no tensor whole."""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch

BLOCK_BYTES = 2**24


@runtime_checkable
class StoredRows(Protocol):
    """Tensors by name whose rows are read from disk at every access. A scalar is one row."""

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor. Raises KeyError."""
        ...

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows ``[first, first + count)``. Raises KeyError, or StateError if they can't be read."""
        ...


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """The shape of a tensor; nothing is read."""
    return tensors.shape(name) if isinstance(tensors, StoredRows) else tensors[name].shape


def row_blocks(tensors: Mapping[str, torch.Tensor], name: str) -> Iterator[torch.Tensor]:
    """The rows of a tensor in order, in blocks of about ``BLOCK_BYTES`` bytes of float32: at least one row each."""
    shape = shape_of(tensors, name)
    count = max(1, BLOCK_BYTES // max(1, 4 * shape[1:].numel()))
    total = shape[0] if shape else 1
    if isinstance(tensors, StoredRows):
        for first in range(0, total, count):
            yield tensors.rows(name, first, min(count, total - first))
    else:
        whole = tensors[name].detach().reshape(shape or (1,))
        yield from (whole[first : first + count] for first in range(0, total, count))
