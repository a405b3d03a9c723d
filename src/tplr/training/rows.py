"""Reads rows of a model's tensors, in memory or on disk, without reading a whole tensor."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

BLOCK_BYTES = 2**24


class StoredRows(ABC):
    """Tensors by name whose rows are read from disk at every access. A scalar is one row.

    It is a base class and not a protocol, because ``isinstance`` with a protocol takes a hundred times longer, and the
    hash of a model needs one check for each tensor.
    """

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor. Raises KeyError."""

    @abstractmethod
    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return rows ``[first, first + count)``. Raises KeyError, or StateError if they can't be read."""


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor without reading it."""
    return tensors.shape(name) if isinstance(tensors, StoredRows) else tensors[name].shape


def row_blocks(tensors: Mapping[str, torch.Tensor], name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in order, in blocks of about ``BLOCK_BYTES`` bytes of float32, at least one row each."""
    if isinstance(tensors, StoredRows):
        for first, count in _blocks(tensors.shape(name)):
            yield tensors.rows(name, first, count)
        return
    whole = tensors[name].detach()
    rows = whole.reshape(whole.shape or (1,))
    yield from (rows[first : first + count] for first, count in _blocks(whole.shape))


def _blocks(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each block."""
    total, most = shape[0] if shape else 1, max(1, BLOCK_BYTES // max(1, 4 * shape[1:].numel()))
    return ((first, min(most, total - first)) for first in range(0, total, most))
