"""Collates records of unequal length into batches, padded with zeros."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplr.errors import DataError

Batch = dict[str, Tensor]


def collate_pairs(items: Sequence[dict[str, Tensor]]) -> Batch:
    """All keys as (B, T), where T is the longest row of any key: both sides of a pair get the same length."""
    length = max(len(row) for item in items for row in item.values())
    return {key: torch.stack([padded(item[key], length) for item in items]) for key in items[0]}


def collate_grpo(items: Sequence[dict[str, Any]]) -> Batch:
    """See ``GrpoDataset.collate``.

    Raises:
        DataError: the records have different numbers of responses.
    """
    sizes = {len(item["responses"]) for item in items}
    if len(sizes) > 1:
        raise DataError(f"a batch has prompts with {sorted(sizes)} responses: prepare records with equal numbers")
    longest = max((len(part) for item in items for part in item["responses"]), default=0)
    prompt = max(len(item["prompts"]) for item in items)
    marks = [torch.ones(len(item["prompts"]), dtype=torch.bool) for item in items]
    return {
        "prompts": torch.stack([padded(item["prompts"], prompt, left=True) for item in items]),
        "prompts_mask": torch.stack([padded(mark, prompt, left=True) for mark in marks]),
        "responses": _grouped([item["responses"] for item in items], longest),
        "masks": _grouped([item["masks"] for item in items], longest),
        "rewards": torch.stack([item["rewards"] for item in items]),
    }


def padded(row: Tensor, length: int, *, left: bool = False) -> Tensor:
    """A row padded with zeros to ``length``, on the right or on the left."""
    empty = row.new_zeros(length - len(row))
    return torch.cat([empty, row] if left else [row, empty])


def _grouped(groups: Sequence[Sequence[Tensor]], length: int) -> Tensor:
    return torch.stack([torch.stack([padded(row, length) for row in group]) for group in groups])
