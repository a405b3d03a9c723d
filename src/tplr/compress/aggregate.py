"""Many peers' updates, added up in one order by everyone, with no one heavier than the others."""

from collections.abc import Iterator, Sequence

import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.payload import ENTRIES_AT_ONCE, Coefficients


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


def norms(peers: Sequence[torch.Tensor]) -> list[float]:
    """L2 norms of equally many finite values each, the same on every machine.

    Squares are rounded to multiples of a tiny part of the largest and added as integers: no order matters. The result
    is right to six digits at least, and usually to nine.
    """
    found: list[float] = []
    at_once = max(1, ENTRIES_AT_ONCE // peers[0].numel())
    for start in range(0, len(peers), at_once):
        squares = torch.stack(list(peers[start : start + at_once])).flatten(1).double().square_()
        steps = 2 ** (62 - squares.shape[1].bit_length())
        # Not below a float32's square, so that a peer of zeros is no division by zero.
        largest = squares.amax(dim=1).clamp_(min=2.0**-300)
        total = squares.mul_((steps / largest)[:, None]).round_().long().sum(dim=1)
        found += (total.double() / steps * largest).sqrt().tolist()
    return found


def clip_to_median(norms: Sequence[float]) -> list[float]:
    """Factors that bring each norm down to the lower median of all; 1 for those that are not above it."""
    median = sorted(norms)[(len(norms) - 1) // 2]
    return [median / one if one > median else 1.0 for one in norms]
