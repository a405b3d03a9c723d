"""Finds updates that copy another update of the same window."""

from collections.abc import Mapping

from tplr.scoring.documented.overlap import Traits, overlap

# Overlap from which an update is a copy. Honest miners stay below 0.65, even in a run's first windows, when all updates
# are nearly equal. A copy has 1, or 0.76 if a fifth of its coordinates are its own.
COPIED = 0.7


def find_copies(now: Mapping[int, Traits], fixed: Mapping[int, float | None]) -> dict[int, int]:
    """Return the copies among a window's updates: by uid, the uid whose update is copied.

    Args:
        now: traits by uid, all from one sample of chunks.
        fixed: time at which each update's bytes were fixed, unix seconds, None if not known. Of two similar updates the
            later one is the copy; if the times are equal, both are; if a time is not known, neither is.
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
