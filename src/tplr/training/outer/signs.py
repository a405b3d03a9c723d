"""Computes signs of a decoded sum of updates that are equal on every machine, although matrix products are not.

Matrix products round differently on different processors and numbers of threads. An entry so near to zero that float32
rounding could change its sign is computed again in float64. An entry that float64 rounding could change counts as zero.
Machines can still differ for an entry right at that limit: in one of about 1e15 entries, instead of 1e7. A sender that
knew the limit could place an entry there, so it depends on all updates of the step (``zero_limit``).
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tplr.compress.aggregate import scatter_sum
from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import inverse, inverse_at, inverse_sparse, working_dtype
from tplr.compress.payload import Coefficients, Update
from tplr.seeds import derive

# An entry below this share of the summed peers' largest coefficients, or up to twice it, counts as zero. Quantized
# values often cancel, and float64 then leaves about 1e-16 of them, with either sign.
CANCELLED = 1e-10
# An entry below this share of the bound on a chunk's root mean square is computed in float64. The bound comes from the
# sum of the peers' norms, as if nothing cancelled. Measured with chunks of 64 x 64, 32 to 4096 values and one to 15
# peers: with random values the share is at least 35 standard deviations of float32's error, and three times the largest
# error of a million entries. Values that are chosen to add up in one entry have errors of 0.2 (32 values) to 4 times
# the share (4096), but that entry is far from zero then: with chosen values, the largest entry with a wrong sign had
# 0.4 of the share.
UNCERTAIN = 2.0**-17
# Many peers can also choose how their additions round. The error of an entry is then at most ``peers * sqrt(values) /
# 128`` of that share, 0.7 for 15 peers with 32 values, so above a half of it the share grows in proportion.
MANY = 64
# Below this float32 has fewer digits, so every entry is uncertain.
SMALLEST = 2.0**-100


def zero_limit(updates: Sequence[Update]) -> float:
    """Return the share of the largest coefficients below which an entry of their sum counts as zero.

    It is between ``CANCELLED`` and twice that, by a seed of all updates in uid order: no sender knows it before the
    others' updates are committed.
    """
    return CANCELLED * (1 + derive("cancelled", *(update.sha256 for update in updates)) / 2**64)


def signs_of_sum(
    peers: Coefficients, grid: ChunkGrid, limit: float = CANCELLED
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Compute the signs of the inverse DCT of the sum over peers, by row block.

    Args:
        peers: indices int64 and values float32, [peers, chunks, k] each.
        limit: an entry below this share of the peers' largest coefficients counts as zero.

    Yields:
        Bands of the grid, and the signs of their entries (-1, 0 or 1) as float32 [chunks, entries].
    """
    indices, values = peers
    largest = values.abs().amax(dim=2).sum(dim=0, dtype=torch.float64)
    cancelled = limit * largest
    # norm <= sqrt(k) * largest, and the root mean square of n entries is the coefficients' norm / sqrt(n).
    root = math.sqrt(values.shape[2])
    share = UNCERTAIN * max(1.0, len(values) * root / MANY)
    uncertain = largest * (share * root / math.sqrt(grid.entries))
    uncertain = uncertain.clamp_(min=SMALLEST).where(largest > 0, 0).float()
    exact = working_dtype(values.device) == torch.float64
    for bands, chunks in grid.row_blocks(values.device):
        some = indices[:, chunks], values[:, chunks]
        if exact:
            yield bands, _exact_signs(some, cancelled[chunks], grid)
        else:
            yield bands, _signs(some, cancelled[chunks], uncertain[chunks], grid)


def _signs(peers: Coefficients, cancelled: torch.Tensor, uncertain: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """Compute the signs of a row block on a CPU, float32 [chunks, entries].

    The few uncertain entries are computed with NumPy, which has less overhead per operation.

    Args:
        cancelled: entries not above it count as zero, float64 [chunks].
        uncertain: entries below it are computed in float64, float32 [chunks].
    """
    indices, values = peers
    if len(indices) == 1:
        rough = inverse_sparse(indices[0], values[0], grid)
    else:
        rough = inverse(scatter_sum(indices, values, grid), grid)
    chunks, entries = below(rough.abs(), uncertain)
    signs = rough.sign_()
    if len(entries) > len(signs):
        # With this many entries, whole chunks take less time than single entries.
        some = torch.from_numpy(np.unique(chunks))
        signs[some] = _exact_signs((indices[:, some], values[:, some]), cancelled[some], grid)
    else:
        sent = len(indices) * indices.shape[2]
        where, what = (one.numpy().swapaxes(0, 1)[chunks].reshape(-1, sent) for one in peers)
        exact = inverse_at(where, what.astype(np.float64), entries, grid)
        signs.numpy()[chunks, entries] = np.where(np.abs(exact) > cancelled.numpy()[chunks], np.sign(exact), 0)
    return signs


def _exact_signs(peers: Coefficients, cancelled: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    indices, values = peers
    entries = inverse(scatter_sum(indices, values.double(), grid), grid)
    return entries.sign().where(entries.abs() > cancelled[:, None], 0).float()


def below(magnitudes: torch.Tensor, bounds: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns where ``magnitudes`` [rows, n] < ``bounds`` [rows]; CPU only.

    Fast if few rows have such an entry, because each row's smallest entry is compared first.
    """
    few = np.flatnonzero(magnitudes.amin(dim=1).numpy() < bounds.numpy())
    found = np.flatnonzero(magnitudes.numpy()[few] < bounds.numpy()[few, None])
    rows, columns = np.divmod(found, magnitudes.shape[1])
    return few[rows], columns
