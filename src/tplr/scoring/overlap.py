"""Which updates repeat others: coordinates and signs compared over all pairs, in chunks that nobody knows beforehand.

In each sampled chunk an update is a row of -1, 0, 1: the signs of what it sends. With all rows in one matrix X, the
product |X| |X|ᵀ counts the coordinates that two updates share, and X Xᵀ those of equal sign less those of opposite
sign. So all pairs of 256 miners cost three matrix products, in blocks of bounded memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.draw import Draw

# So many chunks of 32 coordinates tell a share to within half a percent.
SAMPLED_CHUNKS = 256
# Entries of the dense matrix that is multiplied at a time.
BLOCK_ENTRIES = 2**24


class Traits(NamedTuple):
    """What is compared of one update.

    Attributes:
        columns: int64, ascending: its coordinates in the sampled chunks, laid end to end.
        signs: float32, of the same length: -1, 0 or 1.
        norm: L2 norm of all its values.
    """

    columns: torch.Tensor
    signs: torch.Tensor
    norm: float


@dataclass(frozen=True)
class Sample:
    """Chunks to compare: by tensor name, their numbers, ascending."""

    chunks: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, spec: PayloadSpec, seed: int) -> "Sample":
        """``SAMPLED_CHUNKS`` different chunks of the sparse tensors, or all; each equally likely."""
        places = [(name, place.grid.chunks) for name, place in spec.tensors.items() if not place.dense]
        total = sum(count for _, count in places)
        draw, picked = Draw(seed), set(range(total) if total <= SAMPLED_CHUNKS else ())
        while len(picked) < min(SAMPLED_CHUNKS, total):
            picked.add(draw.integers(0, total))
        chunks, start = {}, 0
        for name, count in places:
            chunks[name] = tuple(sorted(number - start for number in picked if start <= number < start + count))
            start += count
        return cls(chunks)


def traits(update: Update, sample: Sample) -> Traits:
    """What is compared of ``update``; decodes one tensor at a time."""
    columns, signs, squares, start = [], [], [], 0
    for name, place in update.spec.tensors.items():
        indices, values = update.coefficients(name)
        squares.append(float(values.double().square().sum()))
        picked = list(sample.chunks.get(name, ()))
        if picked:
            offsets = start + place.grid.entries * torch.arange(len(picked)).unsqueeze(1)
            columns.append((indices[picked] + offsets).flatten())
            signs.append(values[picked].sign().flatten())
            start += place.grid.entries * len(picked)
    if not columns:
        return Traits(torch.empty(0, dtype=torch.int64), torch.empty(0), math.sqrt(math.fsum(squares)))
    return Traits(torch.cat(columns), torch.cat(signs).float(), math.sqrt(math.fsum(squares)))


class Overlap(NamedTuple):
    """Of all pairs of ``n`` updates, float32 [n, n].

    Attributes:
        indices: shared coordinates over those that an update sends.
        compared: shared coordinates at which neither value is zero.
        opposed: those of them at which the signs differ.
    """

    indices: torch.Tensor
    compared: torch.Tensor
    opposed: torch.Tensor


def overlap(found: Sequence[Traits]) -> Overlap:
    """Compare all pairs of ``found``, whose traits are of one sample."""
    n = len(found)
    shared, compared, agreed = torch.zeros(3, n, n)
    columns = _shared_columns(found)
    end = max((int(one.max()) + 1 for one, _ in columns if len(one)), default=0)
    width = max(1, BLOCK_ENTRIES // max(1, n))
    for start in range(0, end, width):
        present, signs = torch.zeros(2, n, min(width, end - start))
        for row, (where, sign) in enumerate(columns):
            inside = slice(*torch.searchsorted(where, torch.tensor([start, start + width])).tolist())
            present[row, where[inside] - start] = 1.0
            signs[row, where[inside] - start] = sign[inside]
        shared += present @ present.T
        agreed += signs @ signs.T
        compared += signs.abs() @ signs.abs().T
    sent = torch.tensor([max(1, len(one.columns)) for one in found], dtype=torch.float32)
    return Overlap(shared / torch.minimum(sent.unsqueeze(0), sent.unsqueeze(1)), compared, (compared - agreed) / 2)


def _shared_columns(found: Sequence[Traits]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Columns and signs of each, without the columns that only one sends; the others are numbered without gaps."""
    if not found:
        return []
    _, numbers, counts = torch.unique(
        torch.cat([one.columns for one in found]), return_inverse=True, return_counts=True
    )
    kept = counts > 1
    place = kept.cumsum(0) - 1
    parts = numbers.split([len(one.columns) for one in found])
    return [(place[part[kept[part]]], one.signs[kept[part]]) for one, part in zip(found, parts, strict=True)]
