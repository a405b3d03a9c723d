"""The orthonormal DCT-II of chunks and its inverse (DCT-III): ``basis @ chunk @ basis.T``.

Products are float32 on a CPU. If a setting may reduce the precision of float32 products (TF32 on GPUs, autocast), they
are float64, which no setting changes.
"""

import functools
import math

import numpy as np
import torch
from torch.nn.functional import conv2d, embedding

from tplr.compress.chunks import ChunkGrid

_CPU = torch.device("cpu")


def working_dtype(device: torch.device) -> torch.dtype:
    """Return the type of products on a device: float32 if float32 products have full precision, else float64."""
    plain = torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    return torch.float32 if device.type == "cpu" and plain else torch.float64


def transform(chunks: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Compute DCT coefficients of chunks: float32 or float64 [chunks, entries] → the same shape and type."""
    tall, wide = (basis(size, chunks.dtype, chunks.device) for size in (grid.chunk_rows, grid.chunk_cols))
    return _multiply_both_sides(chunks, tall, wide)


def inverse(coefficients: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Invert ``transform``: float32 or float64 [chunks, entries] → the same shape and type."""
    tall, wide = (basis(size, coefficients.dtype, coefficients.device) for size in (grid.chunk_rows, grid.chunk_cols))
    return _multiply_both_sides(coefficients, tall.T, wide.T)


def inverse_sparse(indices: torch.Tensor, values: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Compute ``inverse`` of sparse chunks: indices int64 and values [chunks, k] each → [chunks, entries].

    A coefficient is an outer product of two basis rows. With fewer coefficients than rows of a chunk, summing these
    products takes at most half of the work, and no memory for zeros.
    """
    if values.shape[1] > max(grid.chunk_rows, grid.chunk_cols):
        dense = values.new_zeros(len(values), grid.entries).scatter_(1, indices, values)
        return inverse(dense, grid)
    tall, wide = (basis(size, values.dtype, values.device) for size in (grid.chunk_rows, grid.chunk_cols))
    down = embedding(indices // grid.chunk_cols, tall).mul_(values[..., None])
    return (down.mT @ embedding(indices % grid.chunk_cols, wide)).flatten(1)


def inverse_at(indices: np.ndarray, values: np.ndarray, entries: np.ndarray, grid: ChunkGrid) -> np.ndarray:
    """Compute one entry of the ``inverse`` of each chunk, float64 [chunks]; for a few chunks.

    Args:
        indices, values: coefficients, [chunks, any number] each; coefficients with the same index are added.
        entries: index of the entry in each chunk, int64 [chunks].
    """
    tall, wide = (basis(size, torch.float64, _CPU).numpy() for size in (grid.chunk_rows, grid.chunk_cols))
    down, across = np.divmod(entries[:, None], grid.chunk_cols)
    tall_frequencies, wide_frequencies = np.divmod(indices, grid.chunk_cols)
    return (tall[tall_frequencies, down] * wide[wide_frequencies, across] * values).sum(axis=1)


@functools.lru_cache(maxsize=64)
def basis(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return orthogonal [size, size], row per frequency ``f``: ``sqrt(2/size) * cos(pi * (2i+1) * f / (2 size))``.

    Row 0 is ``sqrt(1/size)``. Ahmed, Natarajan, Rao, "Discrete Cosine Transform", IEEE Trans. Computers C-23 (1974).
    """
    # Angles are multiples of pi / (2 size) with period 4 size; the cosine of a right angle is set to exactly zero.
    cosines = [
        0.0 if phase % (2 * size) == size else math.cos(math.pi * phase / (2 * size)) for phase in range(4 * size)
    ]
    rows = [
        [math.sqrt((2 if f else 1) / size) * cosines[(2 * i + 1) * f % (4 * size)] for i in range(size)]
        for f in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(device, dtype)


def _multiply_both_sides(chunks: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute ``left @ chunk @ right.T`` for each chunk of [chunks, entries]."""
    matrices = chunks.reshape(-1, len(left), len(right))
    if chunks.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        # The same products as convolutions: first over a chunk as an image, with filters of its height, then over its
        # rows as pixels. This is faster than BLAS here, and needs no transposition in between.
        halfway = conv2d(matrices[:, None], left[:, None, :, None])
        rows = halfway.permute(0, 3, 1, 2)
        return conv2d(rows, right[:, :, None, None]).permute(0, 2, 3, 1).reshape(chunks.shape)
    return (left @ matrices @ right.T).reshape(chunks.shape)
