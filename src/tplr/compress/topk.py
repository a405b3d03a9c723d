"""Selects the k entries of each row with the largest magnitudes, or the largest entry of each group."""

import numpy as np
import torch
from torch.nn.functional import pad

from tplr.compress.bits import positions
from tplr.compress.chunks import largest_divisor

# More groups take longer to rank; fewer leave more candidates. With four per entry, 1.2 candidates per entry are left.
GROUPS_PER_ENTRY = 4


def select(rows: torch.Tensor, k: int, *, grouped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``top_k``, or ``largest_of_groups`` if ``grouped`` and k is not the whole row."""
    return largest_of_groups(rows, k) if grouped and k < rows.shape[1] else top_k(rows, k)


def largest_of_groups(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices int64 [count, k] and values [count, k] of the largest magnitude in each of the k groups.

    Groups are those of ``interleaved.py``. Among equal magnitudes the lower index wins.

    Args:
        rows: finite, [count, n].
    """
    count, n = rows.shape
    places = -(-n // k)
    magnitude = pad(rows.abs(), (0, k * places - n), value=-1).view(count, places, k)
    # Comparisons find the first largest entry in a third of the time of ``argmax`` on a CPU.
    dtype = torch.uint8 if places < 2**8 else torch.int32
    left = torch.arange(places, 0, -1, dtype=dtype, device=rows.device)[:, None]
    first = places - ((magnitude == magnitude.amax(dim=1, keepdim=True)) * left).amax(dim=1).long()
    indices = first.mul_(k).add_(torch.arange(k, device=rows.device))
    return indices, rows.gather(1, indices)


def top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices int64 [count, k], ascending, and values [count, k] of each row's k largest magnitudes.

    Among equal magnitudes the lower index wins on every device (``torch.topk`` does not guarantee that).

    Args:
        rows: finite, [count, n].
    """
    count, n = rows.shape
    if k == n:
        return torch.arange(k, device=rows.device).expand(count, k), rows
    magnitude = rows.abs()
    # Only the few entries that reach the bound are ranked, in a fraction of the time of ``torch.topk`` of all entries.
    candidates = at_least(magnitude, _lower_bound(magnitude, k))
    size, row = magnitude.view(-1).index_select(0, candidates), candidates // n
    held = torch.bincount(row, minlength=count)
    first = held.cumsum(0) - held
    table = magnitude.new_full((count, int(held.max())), -1)
    table[row, torch.arange(len(row), device=row.device) - first[row]] = size
    smallest = _largest(table, k)[row]
    taken = size >= smallest
    if int(taken.sum()) > count * k:
        above, level = size > smallest, size == smallest
        # A row keeps the first ``room`` of the entries that equal its smallest one.
        room = k - torch.bincount(row[above], minlength=count)
        before = level.cumsum(0) - level.long()
        taken = above | (level & (before - before[first][row] < room[row]))
    flat = candidates[taken]
    return (flat % n).view(count, k), rows.reshape(-1).index_select(0, flat).view(count, k)


def at_least(magnitudes: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return flat positions where ``magnitudes`` [rows, n] >= ``bounds`` [rows, 1]: int64, ascending."""
    if magnitudes.device.type == "cpu":
        # A third of the time of torch's comparison with a number for each row.
        return torch.from_numpy(np.flatnonzero(magnitudes.numpy() >= bounds.numpy()))
    return positions((magnitudes >= bounds).view(-1))


def _lower_bound(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Return a lower bound [count, 1] of each row's k-th largest entry: the k-th largest maximum of equal groups."""
    count, n = magnitude.shape
    size = largest_divisor(n, max(1, n // (GROUPS_PER_ENTRY * k)))
    return _largest(magnitude.view(count, size, n // size).amax(dim=1), k)[:, None]


def _largest(table: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest entry of each row: [count, any number] → [count]."""
    if table.device.type == "cpu":
        # Half of the time of torch's top-k.
        return torch.from_numpy(np.sort(table.numpy(), axis=1)[:, -k])
    return table.topk(k, dim=1, sorted=False).values.amin(dim=1)
