"""The signs of a decoded sum of updates, alike on every machine although their matrix products are not.

Products of matrices round differently from one processor, or number of threads, to the next. So an entry so near to
zero that float32's rounding could turn its sign is computed again in float64, and what float64's rounding could turn
counts as zero. There is no such gap between float64's results and the limit to zero: that two machines differ in one
entry of a model takes about 1e15 entries, not 1e7.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from tplr.compress import search
from tplr.compress.aggregate import scatter_sum
from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import inverse, inverse_at, inverse_sparse, working_dtype
from tplr.compress.payload import Coefficients

# Where coefficients cancel, float64 leaves some 1e-16 of them, of either sign. Quantized values cancel often. What is
# below this part of the largest coefficients that were added counts as zero.
CANCELLED = 1e-10
# Of a chunk's root mean square, were nothing to cancel: the norms of peers' coefficients added up bound that of their
# sum, and float32's errors in adding them. Some fifty standard deviations of its error in all, or more; five times the
# largest one seen.
UNCERTAIN = 2.0**-17
# Below it float32 has fewer digits, so nothing is certain.
SMALLEST = 2.0**-100


def signs_of_sum(peers: Coefficients, grid: ChunkGrid) -> Iterator[tuple[slice, torch.Tensor]]:
    """Signs of the inverse DCT of the sum over peers ([peers, chunks, k] each), slab by slab.

    Yields:
        Which rows of the matrix, and for each of their entries -1, 0 or 1: float32 [chunks, entries].
    """
    indices, values = peers
    largest = values.abs().amax(dim=2).sum(dim=0, dtype=torch.float64)
    cancelled = CANCELLED * largest
    # A norm of k coefficients is at most the root of k times the largest; the root mean square of n entries is their
    # coefficients' norm by the root of n.
    uncertain = largest * (UNCERTAIN * math.sqrt(values.shape[2] / grid.entries))
    uncertain = uncertain.clamp_(min=SMALLEST).where(largest > 0, 0).float()
    exact = working_dtype(values.device) == torch.float64
    for rows, chunks in grid.row_blocks(values.device):
        some = indices[:, chunks], values[:, chunks]
        if exact:
            yield rows, _exact_signs(some, cancelled[chunks], grid)
        else:
            yield rows, _signs(some, cancelled[chunks], uncertain[chunks], grid)


def _signs(peers: Coefficients, cancelled: torch.Tensor, uncertain: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Of a slab, on a CPU: float32 [chunks, entries].

    What is done for the few uncertain entries is done with NumPy, which starts an operation in less time.

    Args:
        cancelled: what counts as zero, float64 [chunks].
        uncertain: below what an entry's sign is that of its float64 value, float32 [chunks].
    """
    indices, values = peers
    rough = _rough(indices, values, grid)
    chunks, entries = search.below(rough.abs(), uncertain)
    signs = rough.sign_()
    if len(entries) > len(signs):
        # So many entries, one by one, would take more time than all of their chunks.
        some = torch.from_numpy(np.unique(chunks))
        signs[some] = _exact_signs((indices[:, some], values[:, some]), cancelled[some], grid)
    else:
        sent = len(indices) * indices.shape[2]
        where, what = (one.numpy().swapaxes(0, 1)[chunks].reshape(-1, sent) for one in peers)
        exact = inverse_at(where, what.astype(np.float64), entries, grid)
        signs.numpy()[chunks, entries] = np.where(np.abs(exact) > cancelled.numpy()[chunks], np.sign(exact), 0)
    return signs


def _rough(indices: torch.Tensor, values: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """The entries, float32."""
    if len(indices) == 1:
        return inverse_sparse(indices[0], values[0], grid)
    return inverse(scatter_sum(indices, values, grid), grid)


def _exact_signs(peers: Coefficients, cancelled: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    indices, values = peers
    entries = inverse(scatter_sum(indices, values.double(), grid), grid)
    return entries.sign().where(entries.abs() > cancelled[:, None], 0).float()
