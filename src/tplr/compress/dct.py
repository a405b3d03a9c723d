"""The orthonormal DCT of chunks (type II) and its inverse (type III), as two small matrix products.

Both run in float64. What a matrix product rounds depends on the machine; in float64 that is nine digits below
anything the outer step looks at, and no switch for reduced precision (TF32, autocast) touches it.
"""

import functools
import math

import torch

from tplr.compress.chunks import ChunkGrid


@functools.lru_cache(maxsize=64)
def basis(size: int, device: torch.device) -> torch.Tensor:
    """Float64 [size, size], a row per frequency ``f``: ``sqrt(2/size) * cos(pi * (2i+1) * f / (2 size))``.

    Row 0 is ``sqrt(1/size)``, so that the matrix is orthogonal.
    """
    # Angles are multiples of pi / (2 size) and repeat every 4 size; a right angle is made exactly zero.
    cosines = [
        0.0 if phase % (2 * size) == size else math.cos(math.pi * phase / (2 * size)) for phase in range(4 * size)
    ]
    rows = [
        [math.sqrt((2 if f else 1) / size) * cosines[(2 * i + 1) * f % (4 * size)] for i in range(size)]
        for f in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def transform(band: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Coefficients of a band of whole chunk rows: [rows, cols] → float64 [chunks, entries]."""
    tall, wide = grid.chunk_rows, grid.chunk_cols
    along = band.to(torch.float64).reshape(-1, wide) @ basis(wide, band.device).T
    both = basis(tall, band.device) @ along.view(-1, tall, grid.cols)
    return both.view(-1, tall, grid.cols // wide, wide).transpose(1, 2).reshape(-1, grid.entries)


def inverse(coefficients: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """The band that ``transform`` made these of: float64 [chunks, entries] → float64 [rows, cols]."""
    tall, wide = grid.chunk_rows, grid.chunk_cols
    chunks = coefficients.view(-1, grid.cols // wide, tall, wide)
    both = chunks.transpose(1, 2).reshape(-1, tall, grid.cols)
    along = basis(tall, coefficients.device).T @ both
    return (along.reshape(-1, wide) @ basis(wide, coefficients.device)).view(-1, grid.cols)
