"""Whom a validator evaluates, and whose updates the network gathers."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# Fewer miners than this for each bin are one bin: a bin of one or two would be evaluated all the time.
FEWEST_IN_BIN = 4


def evaluation_bins(pool: Iterable[int], finals: Mapping[int, float], bins: int) -> list[tuple[int, ...]]:
    """The pool by final score, best first, cut into bins of nearly equal size; one bin while it is small."""
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
    """``count`` of the pool, ascending: drawn by how long they wait, from the bin whose turn it is.

    Miners of like score meet, so that their ranks say something. Who has waited for twice as long as a whole round of
    the pool takes comes first, whatever its bin, so that nobody is forgotten.
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
    drawn = PCG64Stream(seed).weighted_sample(rest, [waiting.get(uid, 1) for uid in rest], count - len(overdue))
    return tuple(sorted([*overdue, *drawn]))


class ChosenPeers(NamedTuple):
    """Whose updates are gathered, ascending, and who fills in for one that is missing, first one first."""

    peers: tuple[int, ...]
    reserve: tuple[int, ...]


def first_peers(
    candidates: Iterable[int], incentive: Mapping[int, float], *, active: Sequence[int], at_most: int, reserve: int
) -> ChosenPeers:
    """The first list of a run, before anybody has a score: candidates by incentive on chain, then active ones.

    Who has incentive comes first, by that; then who is active; then the rest; ties go to the lower uid.
    """
    lively = set(active)
    return _cut(
        sorted(set(candidates), key=lambda uid: (-incentive.get(uid, 0.0), uid not in lively, uid)), at_most, reserve
    )


def next_peers(
    active: Iterable[int], weights: Mapping[int, float], *, at_least: int, at_most: int, reserve: int, seed: int
) -> ChosenPeers | None:
    """A later list: active miners by weight; None if there are fewer than ``at_least``: the old list stays.

    Among equals, newcomers without weight for instance, the seed decides.
    """
    ranked = sorted(set(active), key=lambda uid: (-weights.get(uid, 0.0), derive("peer", seed, uid)))
    return None if len(ranked) < at_least else _cut(ranked, at_most, reserve)


def _cut(ranked: Sequence[int], at_most: int, reserve: int) -> ChosenPeers:
    return ChosenPeers(tuple(sorted(ranked[:at_most])), tuple(ranked[at_most : at_most + reserve]))
