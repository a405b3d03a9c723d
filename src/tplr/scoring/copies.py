"""Finds updates that repeat another one, of this window or of the window before."""

from collections.abc import Mapping
from typing import NamedTuple

from tplr.scoring.overlap import Traits, overlap

# Overlap from which an update is a copy. Honest miners stay below 0.65, even in a run's first windows, when all send
# nearly the same. A copy has 1, and 0.76 if a fifth of its coordinates is its own (``scripts/copy_margins.py``).
COPIED = 0.7


class Copy(NamedTuple):
    """The rule of ``penalties.py`` that strikes, and the uid whose update is repeated."""

    rule: str
    source: int


def find_copies(
    now: Mapping[int, Traits], before: Mapping[int, Traits], fixed: Mapping[int, float | None]
) -> dict[int, Copy]:
    """The copies among the updates of this window, by uid.

    Args:
        now, before: traits by uid of this window and of the window before, all of one sample of chunks.
        fixed: when the bytes of each of ``now`` were fixed, in unix seconds, None if not known. Of two similar updates
            the later one is the copy; both, if the times are equal; none, if a time is not known.
    """
    uids, old = sorted(now), sorted(before)
    shared = overlap([*(now[uid] for uid in uids), *(before[uid] for uid in old)])[: len(uids)].fill_diagonal_(0)
    copies: dict[int, Copy] = {}
    for row, column in (shared >= COPIED).nonzero().tolist():
        uid = uids[row]
        if column >= len(uids):
            copies.setdefault(uid, Copy("stale", old[column - len(uids)]))
        elif _not_earlier(fixed[uid], fixed[uids[column]]):
            copies[uid] = Copy("copied_indices", uids[column])
    return copies


def _not_earlier(mine: float | None, theirs: float | None) -> bool:
    return mine is not None and theirs is not None and theirs <= mine
