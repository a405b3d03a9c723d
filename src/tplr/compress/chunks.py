"""The grid of chunks of a tensor; each chunk is transformed and sparsified separately."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

# Entries of a row block, by device. 2**19 float32 entries are 2 MiB and stay in a CPU's cache from one operation to the
# next; a GPU wants fewer, longer operations.
ROW_BLOCK_ENTRIES = {"cpu": 2**19, "cuda": 2**24}


@dataclass(frozen=True)
class ChunkGrid:
    """A tensor as a matrix, and the matrix as a grid of equal chunks, numbered row by row.

    Attributes:
        shape: shape of the tensor.
        rows, cols: shape of the matrix. A vector is one row; dimensions after the first are joined into the columns.
        chunk_rows, chunk_cols: shape of a chunk: the largest divisors of ``rows`` and ``cols`` not above the target.
    """

    shape: tuple[int, ...]
    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int

    @classmethod
    def of(cls, shape: Sequence[int], target_chunk: int) -> "ChunkGrid":
        """Return the grid of a tensor with this shape.

        Raises:
            ValueError: a dimension is zero.
        """
        shape = tuple(shape)
        if 0 in shape:
            raise ValueError(f"shape {shape}: a tensor without entries can't be cut into chunks; leave it out")
        rows, cols = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        return cls(shape, rows, cols, largest_divisor(rows, target_chunk), largest_divisor(cols, target_chunk))

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.rows * self.cols // self.entries

    @property
    def entries(self) -> int:
        """Number of entries of one chunk."""
        return self.chunk_rows * self.chunk_cols

    def stacked(self, count: int) -> "ChunkGrid":
        """Return the grid of ``count`` such tensors' matrices, stacked row-wise."""
        rows = count * self.rows
        return replace(self, shape=(rows, self.cols), rows=rows)

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view [rows, cols]."""
        return tensor.view(self.rows, self.cols)

    def blocks(self, matrix: torch.Tensor) -> torch.Tensor:
        """View whole chunk rows as blocks: [rows, cols] → [chunks down, chunks across, chunk rows, chunk cols]."""
        tall, wide = self.chunk_rows, self.chunk_cols
        return matrix.view(-1, tall, self.cols // wide, wide).transpose(1, 2)

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the entries of whole chunk rows, chunk by chunk: [rows, cols] → [chunks, entries]."""
        return self.blocks(matrix.contiguous()).reshape(-1, self.entries)

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """Invert ``cut``: [chunks, entries] → [rows, cols]."""
        tall, wide = self.chunk_rows, self.chunk_cols
        return chunks.reshape(-1, self.cols // wide, tall, wide).transpose(1, 2).reshape(-1, self.cols)

    def row_blocks(self, device: torch.device | str = "cpu") -> Iterator[tuple[slice, slice]]:
        """Yield row blocks of whole chunk rows that cover the matrix: (rows of the matrix, chunks of the grid)."""
        across = self.cols // self.chunk_cols
        step = max(1, ROW_BLOCK_ENTRIES[torch.device(device).type] // (self.chunk_rows * self.cols))
        down = self.rows // self.chunk_rows
        for start in range(0, down, step):
            stop = min(start + step, down)
            yield slice(start * self.chunk_rows, stop * self.chunk_rows), slice(start * across, stop * across)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``limit``."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)
