"""Selects the uids that a validator evaluates and the peers whose updates are gathered."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# Least and most windows of waiting that count in the draw of the evaluated uids.
LEAST_WAITED, MOST_WAITED = 4, 20


def sample_evaluated(waited: Mapping[int, int], *, count: int, seed: int) -> tuple[int, ...]:
    """``count`` of these uids, ascending, drawn in proportion to the windows since their last evaluation.

    These count from ``LEAST_WAITED`` to ``MOST_WAITED``, so every uid is drawn with a positive chance in every window,
    and none for certain: nobody can read off when it will not be evaluated.

    Args:
        waited: windows since the last evaluation, by uid.
    """
    pool = sorted(waited)
    weights = [min(max(waited[uid], LEAST_WAITED), MOST_WAITED) for uid in pool]
    return tuple(sorted(PCG64Stream(seed).weighted_sample(pool, weights, count)))


class ChosenPeers(NamedTuple):
    """Uids whose updates are gathered, ascending, and their substitutes in the order of use."""

    peers: tuple[int, ...]
    reserve: tuple[int, ...]


def first_peers(
    candidates: Iterable[int], incentive: Mapping[int, float], *, active: Sequence[int], at_most: int, reserve: int
) -> ChosenPeers:
    """The first list of a run, before there are scores.

    Candidates are ordered by falling incentive on chain, then active ones first, then by uid.
    """
    lively = set(active)
    return _cut(
        sorted(set(candidates), key=lambda uid: (-incentive.get(uid, 0.0), uid not in lively, uid)), at_most, reserve
    )


def next_peers(
    active: Iterable[int], weights: Mapping[int, float], *, at_least: int, at_most: int, reserve: int, seed: int
) -> ChosenPeers | None:
    """A later list: active miners by falling weight; None, so that the old list stays, if fewer than ``at_least``.

    The seed orders equal weights, such as those of newcomers.
    """
    ranked = sorted(set(active), key=lambda uid: (-weights.get(uid, 0.0), derive("peer", seed, uid)))
    return None if len(ranked) < at_least else _cut(ranked, at_most, reserve)


def _cut(ranked: Sequence[int], at_most: int, reserve: int) -> ChosenPeers:
    return ChosenPeers(tuple(sorted(ranked[:at_most])), tuple(ranked[at_most : at_most + reserve]))
