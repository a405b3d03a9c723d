"""Many peers' updates, added up in one order by everyone, with no one heavier than the others."""

import math
from collections.abc import Iterator, Sequence

import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.payload import Coefficients


def sums(
    peers: Sequence[Coefficients], weights: Sequence[float], grid: ChunkGrid
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Slab by slab ``sum of weight * chunks`` over peers, in their order.

    A row of indices has no duplicates, so nothing is added in an order that is left open: the same bits on every
    device and with any number of threads.

    Yields:
        Which rows of the matrix, which chunks, and their float64 [chunks, entries], which may be overwritten.
    """
    device = peers[0][0].device
    for rows, chunks in grid.slabs(device):
        total = torch.zeros(chunks.stop - chunks.start, grid.entries, dtype=torch.float64, device=device)
        for (indices, values), weight in zip(peers, weights, strict=True):
            total.scatter_add_(1, indices[chunks], values[chunks].double().mul_(weight))
        yield rows, chunks, total


def norm(values: torch.Tensor) -> float:
    """L2 norm of finite values, the same on every machine.

    Squares are rounded to multiples of a small part of the largest and added as integers: no order matters. The result
    is right to six digits at least, and usually to nine.
    """
    squares = values.double().square_()
    largest = squares.amax().item()
    if not largest:
        return 0.0
    steps = 2 ** (62 - squares.numel().bit_length())
    return math.sqrt(squares.mul_(steps / largest).round_().long().sum().item() / steps * largest)


def clip_to_median(norms: Sequence[float]) -> list[float]:
    """Factors that bring each norm down to the lower median of all; 1 for those that are not above it."""
    median = sorted(norms)[(len(norms) - 1) // 2]
    return [median / one if one > median else 1.0 for one in norms]
