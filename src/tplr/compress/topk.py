"""Which entries of a chunk travel: the k largest in magnitude."""

import torch


def top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices (int64 [rows, k], ascending) and values ([rows, k]) of each row's k largest magnitudes.

    Of equal magnitudes the lower index wins, on every device (``torch.topk`` leaves that open). Values must be finite.
    """
    if k == rows.shape[1]:
        return torch.arange(k, device=rows.device).expand(len(rows), k), rows
    magnitude = rows.abs()
    smallest = magnitude.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    picked = magnitude >= smallest
    crowded = (picked.sum(dim=1) > k).nonzero().squeeze(1)
    if len(crowded):
        above = magnitude[crowded] > smallest[crowded]
        level = picked[crowded] & ~above
        free = k - above.sum(dim=1, keepdim=True)
        picked[crowded] = above | (level & (level.cumsum(dim=1) <= free))
    indices = picked.nonzero()[:, 1].view(len(rows), k)
    return indices, rows.gather(1, indices)
