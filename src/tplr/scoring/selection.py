"""Whom a validator evaluates, and whose updates the network gathers."""

from collections.abc import Iterable, Mapping

from tplr.seeds import derive


def choose_evaluated(uids: Iterable[int], last_windows: Mapping[int, int], count: int, *, seed: int) -> tuple[int, ...]:
    """``count`` of ``uids``, those not evaluated for longest first, so nobody is forgotten; ties in seeded order."""
    order = sorted(uids, key=lambda uid: (last_windows.get(uid, -1), derive("tie", seed, uid)))
    return tuple(sorted(order[:count]))


def choose_peers(candidates: Iterable[int], standing: Mapping[int, float], *, at_most: int) -> tuple[int, ...]:
    """The ``at_most`` candidates of highest standing (score, or incentive on chain), by ascending uid.

    Ties go to the lower uid.
    """
    ranked = sorted(set(candidates), key=lambda uid: (-standing.get(uid, 0.0), uid))
    return tuple(sorted(ranked[:at_most]))
