"""Many peers' updates, added up in one order by everyone, with no one heavier than the others."""

from collections.abc import Iterator, Sequence

import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.payload import ENTRIES_AT_ONCE, Coefficients


def sums(peers: Coefficients, weights: Sequence[float], grid: ChunkGrid) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Slab by slab ``sum of weight * chunks`` over peers ([peers, chunks, k] each), in their order.

    The same bits on every device and with any number of threads: a row of indices has no duplicates, and where rows of
    several peers are added in one operation, a CPU does so from left to right.

    Args:
        weights: of each peer; if ``grid`` is that of several tensors, of the first peer's, then of the next one's...

    Yields:
        Which rows of the matrix, which chunks, and their float64 [chunks, entries], which may be overwritten.
    """
    indices, values = peers
    factors = per_chunk(weights, values)[..., None]
    at_once = len(indices) if indices.device.type == "cpu" else 1
    for rows, chunks in grid.slabs(indices.device):
        total = torch.zeros(chunks.stop - chunks.start, grid.entries, dtype=torch.float64, device=indices.device)
        for start in range(0, len(indices), at_once):
            some = slice(start, start + at_once)
            where, what = indices[some, chunks], values[some, chunks] * factors[some, chunks]
            total.scatter_add_(1, where.transpose(0, 1).flatten(1), what.transpose(0, 1).flatten(1))
        yield rows, chunks, total


def per_chunk(weights: Sequence[float], values: torch.Tensor) -> torch.Tensor:
    """The weights of ``sums`` for each chunk of ``values`` [peers, chunks, k]: float64 [peers, chunks]."""
    peers, chunks, _ = values.shape
    factors = torch.tensor(weights, dtype=torch.float64, device=values.device).view(peers, -1)
    return factors.repeat_interleave(chunks // factors.shape[1], dim=1)


def norms(values: torch.Tensor) -> list[float]:
    """L2 norms of several peers' finite values [peers, ...], the same on every machine.

    Squares are rounded to multiples of a tiny part of the largest and added as integers: no order matters. The result
    is right to six digits at least, and usually to nine.
    """
    found: list[float] = []
    for some in values.split(max(1, ENTRIES_AT_ONCE // values[0].numel())):
        squares = some.flatten(1).double().square_()
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
