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
# Below any share of coordinates that can differ.
TINY = 1e-9


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
    found = margins(overlap([*(now[uid] for uid in uids), *(before[uid] for uid in old)]), len(uids))
    by_indices, by_signs = (one <= 1 for one in found)
    copies: dict[int, Copy] = {}
    for row, column in (by_indices | by_signs).nonzero().tolist():
        uid = uids[row]
        if column >= len(uids):
            copies.setdefault(uid, Copy("stale", old[column - len(uids)]))
        elif _not_earlier(fixed[uid], fixed[uids[column]]):
            copies[uid] = Copy("copied_indices" if by_indices[row, column] else "copied_signs", uids[column])
    return copies


class Margins(NamedTuple):
    """How far pairs are from being copies: what differs over what may; at most 1 is a copy. float32 [count, n].

    Attributes:
        indices: by their coordinates.
        signs: by the signs at shared coordinates; infinite where chance would decide.
    """

    indices: torch.Tensor
    signs: torch.Tensor


def margins(found: Overlap, count: int) -> Margins:
    """Of the first ``count`` updates of ``found``, in rows, to all; what is usual is what is among these ``count``."""
    differing = 1 - found.indices[:count]
    opposed, compared = found.opposed[:count], found.compared[:count]
    usual_differing, usual_opposed = 1.0, USUAL_OPPOSED
    if count > 1:
        others = ~torch.eye(count, dtype=torch.bool)
        rates = opposed[:, :count] / compared[:, :count].clamp(min=1)
        usual_differing = float(differing[:, :count][others].median())
        usual_opposed = min(USUAL_OPPOSED, float(rates[others].median()))
    expected = usual_opposed * compared
    by_indices = differing / max(min(1 - FEWEST_INDICES, UNUSUAL_INDICES * usual_differing), TINY)
    by_signs = (opposed / (UNUSUAL_SIGNS * expected)).where(expected >= FEWEST_EXPECTED, torch.inf)
    for one in (by_indices, by_signs):
        one.fill_diagonal_(torch.inf)
    return Margins(by_indices, by_signs)


def _not_earlier(mine: float | None, theirs: float | None) -> bool:
    return mine is not None and theirs is not None and theirs <= mine
