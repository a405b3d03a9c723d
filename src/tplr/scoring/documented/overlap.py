"""Computes the overlap of all pairs of updates' coordinates, in sampled chunks that nobody knows in advance.

Honest miners share coordinates that all data have in common; a copy also shares its source's random ones. A coordinate
has weight ``log((n + 1) / senders)**2``, because rare words identify a copied text (inverse document frequency). X has
a row of zeros and ones for each update. The shared weight of all pairs is ``(X * weights) Xᵀ``: one matrix product for
256 miners, in blocks of bounded memory.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.pcg64 import PCG64Stream

# This many chunks of 32 coordinates give an overlap to within half a percent.
SAMPLED_CHUNKS = 256
# Entries of a block of X.
BLOCK_ENTRIES = 2**24
# Less than the weight of any coordinate.
TINY = 1e-9


class Traits(NamedTuple):
    """The coordinates of an update for comparison.

    Attributes:
        columns: int64, ascending: its coordinates in the concatenated sampled chunks.
    """

    columns: torch.Tensor


def sample_chunks(spec: PayloadSpec, seed: int) -> dict[str, tuple[int, ...]]:
    """Sample ``SAMPLED_CHUNKS`` different chunks of the sparse tensors with equal probability, or return all.

    Returns:
        Their ascending numbers by tensor name.
    """
    counts = [(name, tensor.grid.chunks) for name, tensor in spec.tensors.items() if not tensor.dense]
    total = sum(count for _, count in counts)
    stream, picked = PCG64Stream(seed), set(range(total) if total <= SAMPLED_CHUNKS else ())
    while len(picked) < min(SAMPLED_CHUNKS, total):
        picked.add(stream.integers(0, total))
    chunks, start = {}, 0
    for name, count in counts:
        chunks[name] = tuple(sorted(number - start for number in picked if start <= number < start + count))
        start += count
    return chunks


def traits(update: Update, sample: Mapping[str, tuple[int, ...]]) -> Traits:
    """Return an update's traits in the chunks of ``sample``; decodes one tensor at a time."""
    columns, start = [torch.empty(0, dtype=torch.int64)], 0
    for name, tensor in update.spec.tensors.items():
        picked = list(sample.get(name, ()))
        if not picked:
            continue
        indices, _ = update.coefficients(name)
        offsets = start + tensor.grid.entries * torch.arange(len(picked)).unsqueeze(1)
        columns.append((indices[picked].sort(dim=1).values + offsets).flatten())
        start += tensor.grid.entries * len(picked)
    return Traits(torch.cat(columns))


def overlap(found: Sequence[Traits]) -> torch.Tensor:
    """Return each pair's shared weight over the lesser of the two updates' weights: float32 [n, n], in [0, 1].

    Args:
        found: traits of one sample.
    """
    n = len(found)
    _, numbers, counts = torch.unique(
        torch.cat([torch.empty(0, dtype=torch.int64), *(one.columns for one in found)]),
        return_inverse=True,
        return_counts=True,
    )
    weights = ((n + 1) / counts).log().square()
    sent = [float(weights[row].sum()) for row in numbers.split([len(one.columns) for one in found])]
    # No pair shares a coordinate with one sender, so the other coordinates are renumbered.
    common = counts > 1
    weights, columns = weights[common], common.cumsum(0) - 1
    rows = [columns[row[common[row]]] for row in numbers.split([len(one.columns) for one in found])]
    shared = torch.zeros(n, n)
    width = max(1, BLOCK_ENTRIES // max(1, n))
    for start in range(0, len(weights), width):
        block = weights[start : start + width]
        present = torch.zeros(n, len(block))
        for row, where in enumerate(rows):
            first, last = torch.searchsorted(where, torch.tensor([start, start + width])).tolist()
            present[row, where[first:last] - start] = 1.0
        shared += (present * block) @ present.T
    total = torch.tensor(sent)
    return shared / torch.minimum(total.unsqueeze(0), total.unsqueeze(1)).clamp(min=TINY)
