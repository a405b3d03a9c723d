"""Computes sums and norms of many peers' coefficients with the same bits on every machine."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.payload import ENTRIES_AT_ONCE, Coefficients


def weighted_sums(
    peers: Coefficients, weights: Sequence[float], grid: ChunkGrid
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Compute ``sum over p of weights[p] * peer p``, in float64, in peer order, one row block at a time.

    Args:
        peers: indices int64 and values float32, [peers, chunks, k] each.

    Yields:
        Bands of the grid and their sum, float64 [chunks, entries], which the caller may overwrite.
    """
    indices, values = peers
    factors = torch.tensor(weights, dtype=torch.float64, device=values.device)[:, None, None]
    for bands, chunks in grid.row_blocks(indices.device):
        yield bands, scatter_sum(indices[:, chunks], values[:, chunks] * factors, grid)


def scatter_sum(indices: torch.Tensor, values: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Sum peers' coefficients, [peers, chunks, k] each → [chunks, entries] of the values' type.

    Every device and every number of threads gives the same bits: a row of indices has no duplicates, and if one
    operation adds rows of several peers, a CPU adds them from left to right.
    """
    peers, chunks, _ = indices.shape
    total = values.new_zeros(chunks, grid.entries)
    at_once = peers if indices.device.type == "cpu" else 1
    for where, what in zip(indices.split(at_once), values.split(at_once), strict=True):
        total.scatter_add_(1, where.transpose(0, 1).flatten(1), what.transpose(0, 1).flatten(1))
    return total


def norms(values: torch.Tensor) -> torch.Tensor:
    """Compute L2 norms over the last two dimensions of finite values: [peers, ..., chunks, k] → float64 [peers, ...].

    Every machine gives the same bits: squares are added pairwise, the second half to the first, until one remains.
    """
    found: list[torch.Tensor] = []
    for some in values.split(max(1, ENTRIES_AT_ONCE[values.device.type] // values[0].numel())):
        squares: Any = some.double().square_()
        if squares.device.type == "cpu":  # NumPy starts an operation in a third of torch's time, and there are many
            squares = squares.numpy()
        for _ in range(2):
            while (count := squares.shape[-2]) > 1:
                half = count // 2
                squares[..., :half, :] += squares[..., count - half :, :]
                squares = squares[..., : count - half, :]
            squares = squares.swapaxes(-2, -1)
        found.append(torch.as_tensor(squares[..., 0, 0], device="cpu"))
    # NumPy's square root is the processor's, rounded by IEEE 754; torch's may be a library's, which can be one bit off.
    return torch.from_numpy(np.sqrt(torch.cat(found).numpy())).to(values.device)


def clip(norms: Sequence[float], cap: float) -> list[float]:
    """Return the factor ``min(1, cap / norm)`` for each norm."""
    return [cap / one if one > cap else 1.0 for one in norms]
