"""Who sent what another one sent, or what was sent before: verdicts from the overlap of all pairs.

How much honest miners share depends on the model and on the time: early in a run they send nearly the same. So a pair
is judged against what is usual in its window.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tplr.scoring.overlap import Overlap, Traits, overlap

# Coordinates: the share of two updates that differs is less than this part of what usually differs, and ...
UNUSUAL_INDICES = 0.25
# ... so much is shared in any case.
FEWEST_INDICES = 0.9
# Signs at shared coordinates: opposed are less than this part of those that usually are, which must be so many, or
# chance decides. What is usual is taken to be at most ``USUAL_OPPOSED``: whoever sends random signs can't make honest
# pairs look alike.
UNUSUAL_SIGNS = 0.1
FEWEST_EXPECTED = 40
USUAL_OPPOSED = 0.02


class Copy(NamedTuple):
    """Which rule of ``penalties.py`` names it, and whose update is repeated."""

    rule: str
    source: int


def find_copies(
    now: Mapping[int, Traits], before: Mapping[int, Traits], fixed: Mapping[int, float | None]
) -> dict[int, Copy]:
    """The updates, by uid, that repeat another one of this window, or any of the window before.

    Args:
        now, before: traits by uid, all of one sample of chunks.
        fixed: since when each of ``now`` was fixed, None if not known. Of two alike, the later one is the copy; both,
            if none is later; none, if one time is not known.
    """
    uids, old = sorted(now), sorted(before)
    found = overlap([*(now[uid] for uid in uids), *(before[uid] for uid in old)])
    indices, signs = _alike(found, len(uids))
    copies: dict[int, Copy] = {}
    for row, column in (indices | signs).nonzero().tolist():
        uid = uids[row]
        if column >= len(uids):
            copies.setdefault(uid, Copy("stale", old[column - len(uids)]))
        elif _not_earlier(fixed[uid], fixed[uids[column]]):
            copies[uid] = Copy("copied_indices" if indices[row, column] else "copied_signs", uids[column])
    return copies


def _alike(found: Overlap, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the first ``count`` updates, in rows, have nearly the indices, or the signs, of which others; bool."""
    others = ~torch.eye(count, dtype=torch.bool)
    if count < 2:
        usual_differing, usual_opposed = 1.0, USUAL_OPPOSED
    else:
        usual_differing = float((1 - found.indices[:count, :count])[others].median())
        rates = found.opposed[:count, :count] / found.compared[:count, :count].clamp(min=1)
        usual_opposed = min(USUAL_OPPOSED, float(rates[others].median()))
    limit = max(FEWEST_INDICES, 1 - UNUSUAL_INDICES * usual_differing)
    indices = found.indices[:count] >= limit
    expected = usual_opposed * found.compared[:count]
    signs = (expected >= FEWEST_EXPECTED) & (found.opposed[:count] <= UNUSUAL_SIGNS * expected)
    for one in (indices, signs):
        one.fill_diagonal_(False)
    return indices, signs


def _not_earlier(mine: float | None, theirs: float | None) -> bool:
    return mine is not None and theirs is not None and theirs <= mine
