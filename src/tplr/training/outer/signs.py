"""The signs of a decoded sum of updates, alike on every machine although their matrix products are not.

Products of matrices round differently from one processor, or number of threads, to the next. So an entry so near to
zero that float32's rounding could turn its sign is computed again in float64, and what float64's rounding could turn
counts as zero. There is no such gap between float64's results and the limit to zero: that two machines differ in one
entry of a model takes about 1e15 entries, not 1e7.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from tplr.compress.aggregate import per_chunk, sums
from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import inverse, inverse_of_few, working_dtype
from tplr.compress.payload import Coefficients

# Where coefficients cancel, float64 leaves some 1e-16 of them, of either sign. Quantized values cancel often. What is
# below this part of the largest coefficients that were added counts as zero.
CANCELLED = 1e-10
# Of a chunk's root mean square: some fifty standard deviations of float32's error, five times the largest one seen.
UNCERTAIN = 2.0**-17


def signs_of_sum(
    peers: Coefficients, weights: Sequence[float], grid: ChunkGrid
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Signs of ``sum of weight * inverse DCT`` over peers ([peers, chunks, k] each), slab by slab; see ``sums``.

    Yields:
        Which rows of the matrix, and for each of their entries -1, 0 or 1: float32 [rows, cols].
    """
    largest = peers[1].abs().amax(dim=2)
    cancelled = CANCELLED * (largest * per_chunk(weights, peers[1])).sum(dim=0)
    for rows, chunks, total in sums(peers, weights, grid):
        if working_dtype(total.device) == torch.float64:
            yield rows, grid.join(_exact_signs(total, cancelled[chunks], grid))
        else:
            yield rows, grid.join(_signs(inverse(total.float(), grid), total.__getitem__, cancelled[chunks], grid))


def signs_of_one(indices: torch.Tensor, values: torch.Tensor, grid: ChunkGrid) -> Iterator[tuple[slice, torch.Tensor]]:
    """``signs_of_sum`` of one peer's [chunks, k], with less work and memory."""
    for rows, chunks in grid.slabs(values.device):
        yield rows, grid.join(_signs_of_few(indices[chunks], values[chunks], grid))


def _signs_of_few(indices: torch.Tensor, values: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    def coefficients(which: slice | torch.Tensor) -> torch.Tensor:
        what = values[which].double()
        return what.new_zeros(len(what), grid.entries).scatter_(1, indices[which], what)

    cancelled = CANCELLED * values.abs().amax(dim=1).double()
    if working_dtype(values.device) == torch.float64:
        return _exact_signs(coefficients(slice(None)), cancelled, grid)
    return _signs(inverse_of_few(indices, values, grid), coefficients, cancelled, grid)


def _signs(
    rough: torch.Tensor, exact: Callable[[torch.Tensor], torch.Tensor], cancelled: torch.Tensor, grid: ChunkGrid
) -> torch.Tensor:
    """Of float32 [chunks, entries], which are overwritten.

    Args:
        exact: gives the float64 coefficients of some chunks.
        cancelled: what counts as zero, float64 [chunks].
    """
    root_mean_square = torch.linalg.vector_norm(rough, dim=1) / math.sqrt(grid.entries)
    smallest = rough.abs().amin(dim=1)
    doubtful = (smallest < UNCERTAIN * root_mean_square + cancelled).nonzero().squeeze(1)
    signs = rough.sign_()
    signs[doubtful] = _exact_signs(exact(doubtful), cancelled[doubtful], grid)
    return signs


def _exact_signs(total: torch.Tensor, cancelled: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    entries = inverse(total, grid)
    return torch.where(entries.abs() > cancelled[:, None], entries.sign(), 0).float()
