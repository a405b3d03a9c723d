"""Who sent what another one sent, or what was sent before: verdicts from the overlap of all pairs."""

from collections.abc import Mapping
from typing import NamedTuple

from tplr.scoring.overlap import Traits, overlap

# Share of what two updates send, by weight: honest miners stay below 0.65, also in a run's first windows, when all send
# nearly the same; a copy has 1, and 0.76 if a fifth of its coordinates is its own (``scripts/copy_margins.py``).
COPIED = 0.7


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
