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
    """A tensor as a matrix, and the matrix as bands of equal chunks, numbered band by band.

    A band has ``chunk_rows`` rows of the matrix: neighbours, or, if ``spread``, every ``bands``-th one.

    Attributes:
        shape: shape of the tensor.
        rows, cols: shape of the matrix. A vector is one row; dimensions after the first are joined into the columns.
        chunk_rows, chunk_cols: shape of a chunk: the largest divisors of ``rows`` and ``cols`` not above the target.
        spread: whether a chunk's rows are spread evenly over the matrix.
    """

    shape: tuple[int, ...]
    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int
    spread: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], target_chunk: int, *, spread: bool = False) -> "ChunkGrid":
        """Return the grid of a tensor with this shape.

        Raises:
            ValueError: a dimension is zero.
        """
        shape = tuple(shape)
        if 0 in shape:
            raise ValueError(f"shape {shape}: a tensor without entries can't be cut into chunks; leave it out")
        rows, cols = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        tall, wide = largest_divisor(rows, target_chunk), largest_divisor(cols, target_chunk)
        return cls(shape, rows, cols, tall, wide, spread)

    @property
    def bands(self) -> int:
        """Number of bands."""
        return self.rows // self.chunk_rows

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.rows * self.cols // self.entries

    @property
    def entries(self) -> int:
        """Number of entries of one chunk."""
        return self.chunk_rows * self.chunk_cols

    def stacked(self, count: int) -> "ChunkGrid":
        """Return the grid of ``count`` such tensors' matrices, stacked row-wise: their bands, if ``spread``."""
        rows = count * self.rows
        return replace(self, shape=(rows, self.cols), rows=rows)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view [bands, chunk rows, cols]."""
        if self.spread:
            return tensor.view(self.chunk_rows, -1, self.cols).transpose(0, 1)
        return tensor.view(-1, self.chunk_rows, self.cols)

    def blocks(self, bands: torch.Tensor) -> torch.Tensor:
        """View bands as blocks: [bands, chunk rows, cols] → [bands, chunks across, chunk rows, chunk cols]."""
        return bands.unflatten(2, (-1, self.chunk_cols)).transpose(1, 2)

    def cut(self, bands: torch.Tensor) -> torch.Tensor:
        """Copy the entries of bands, chunk by chunk: [bands, chunk rows, cols] → [chunks, entries]."""
        return self.blocks(bands).reshape(-1, self.entries)

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """Invert ``cut``: [chunks, entries] → [bands, chunk rows, cols]."""
        tall, wide = self.chunk_rows, self.chunk_cols
        return chunks.reshape(-1, self.cols // wide, tall, wide).transpose(1, 2).reshape(-1, tall, self.cols)

    def row_blocks(self, device: torch.device | str = "cpu") -> Iterator[tuple[slice, slice]]:
        """Yield row blocks of whole bands that cover the matrix: (bands, chunks of the grid)."""
        across = self.cols // self.chunk_cols
        step = max(1, ROW_BLOCK_ENTRIES[torch.device(device).type] // (self.chunk_rows * self.cols))
        for start in range(0, self.bands, step):
            stop = min(start + step, self.bands)
            yield slice(start, stop), slice(start * across, stop * across)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``limit``."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)
