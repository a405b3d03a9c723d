"""Selects the uids that a validator evaluates and the peers whose updates are gathered."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# With fewer miners than this for each bin there is one bin: a bin of one or two would be evaluated all the time.
FEWEST_IN_BIN = 4


def evaluation_bins(pool: Iterable[int], finals: Mapping[int, float], bins: int) -> list[tuple[int, ...]]:
    """The pool by falling final score, in bins of nearly equal size; one bin while the pool is small."""
    ranked = sorted(set(pool), key=lambda uid: (-finals.get(uid, 0.0), uid))
    if len(ranked) < FEWEST_IN_BIN * bins:
        return [tuple(ranked)] if ranked else []
    edges = [len(ranked) * i // bins for i in range(bins + 1)]
    return [tuple(ranked[start:stop]) for start, stop in itertools.pairwise(edges)]


def choose_evaluated(
    pool: Iterable[int],
    finals: Mapping[int, float],
    waiting: Mapping[int, int],
    *,
    window: int,
    count: int,
    bins: int,
    seed: int,
) -> tuple[int, ...]:
    """``count`` uids of the pool, ascending: sampled by waiting time from the window's bin.

    A bin holds miners of similar score, so that their ranks carry information. Uids that have waited for more than two
    rounds of the whole pool come first, whatever their bin.

    Args:
        finals: final scores by uid.
        waiting: windows since the last evaluation, by uid.
    """
    groups = evaluation_bins(pool, finals, bins)
    if not groups:
        return ()
    round_windows = sum(-(-len(group) // count) for group in groups)
    everybody = sorted(uid for group in groups for uid in group)
    overdue = sorted(
        (uid for uid in everybody if waiting.get(uid, 1) > 2 * round_windows),
        key=lambda uid: (-waiting[uid], derive("overdue", seed, uid)),
    )[:count]
    rest = [uid for uid in sorted(groups[window % len(groups)]) if uid not in overdue]
    sampled = PCG64Stream(seed).weighted_sample(rest, [waiting.get(uid, 1) for uid in rest], count - len(overdue))
    return tuple(sorted([*overdue, *sampled]))


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
