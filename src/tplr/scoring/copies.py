"""Who sent what another one sent, or what was sent before: verdicts from the overlap of all pairs."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tplr.scoring.overlap import Traits, overlap

# Of two updates' coordinates: what honest miners share stays far below, a copy with as much noise as signal above.
INDICES_LIMIT = 0.6
# Of shared coordinates, equal signs less opposite ones; looked at where enough are shared to say something.
SIGNS_LIMIT = 0.95
FEWEST_SHARED = 0.3


class Copy(NamedTuple):
    """Which rule of ``penalties.py`` names it, and whose update is repeated."""

    rule: str
    source: int


def find_copies(now: Mapping[int, Traits], before: Mapping[int, Traits], fixed: Mapping[int, float]) -> dict[int, Copy]:
    """The updates, by uid, that repeat another one of this window, or any of the window before.

    Args:
        now, before: traits by uid, all of one sample of chunks.
        fixed: since when each of ``now`` was fixed. Of two alike, the later one is the copy; both, if none is later.
    """
    uids, old = sorted(now), sorted(before)
    found = overlap([*(now[uid] for uid in uids), *(before[uid] for uid in old)])
    copies: dict[int, Copy] = {}
    for row, column in _alike(found.indices, found.signs, len(uids)):
        uid = uids[row]
        if column >= len(uids):
            copies.setdefault(uid, Copy("stale", old[column - len(uids)]))
        elif fixed[uids[column]] <= fixed[uid]:
            many = found.indices[row, column] >= INDICES_LIMIT
            copies[uid] = Copy("copied_indices" if many else "copied_signs", uids[column])
    return copies


def _alike(indices: torch.Tensor, signs: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Rows below ``count`` and the columns that are too much like them, in ascending order."""
    alike = (indices >= INDICES_LIMIT) | ((indices >= FEWEST_SHARED) & (signs >= SIGNS_LIMIT))
    alike.fill_diagonal_(False)
    return [(row, column) for row, column in alike.nonzero().tolist() if row < count]
