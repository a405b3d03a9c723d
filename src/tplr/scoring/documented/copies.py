"""Finds updates that repeat another one of the same window."""

from collections.abc import Mapping

from tplr.scoring.documented.overlap import Traits, overlap

# Overlap from which an update is a copy. Honest miners stay below 0.65, even in a run's first windows, when all send
# nearly the same. A copy has 1, and 0.76 if a fifth of its coordinates is its own.
COPIED = 0.7


def find_copies(now: Mapping[int, Traits], fixed: Mapping[int, float | None]) -> dict[int, int]:
    """The copies among the updates of a window: by uid, the uid whose update is repeated.

    Args:
        now: traits by uid, all of one sample of chunks.
        fixed: when the bytes of each were fixed, in unix seconds, None if not known. Of two similar updates the later
            one is the copy; both, if the times are equal; none, if a time is not known.
    """
    uids = sorted(now)
    shared = overlap([now[uid] for uid in uids]).fill_diagonal_(0)
    return {
        uids[row]: uids[column]
        for row, column in (shared >= COPIED).nonzero().tolist()
        if _not_earlier(fixed[uids[row]], fixed[uids[column]])
    }


def _not_earlier(mine: float | None, theirs: float | None) -> bool:
    return mine is not None and theirs is not None and theirs <= mine
