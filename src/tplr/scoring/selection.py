"""Selects the uids that a validator evaluates and the peers whose updates are gathered."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# Least and most windows of waiting that count in the draw of the evaluated uids.
LEAST_WAITED, MOST_WAITED = 2, 20
# Miners on probation beside the reserve, where a list is shorter than this.
FEWEST_ON_PROBATION = 16
# One in so many of the drawn uids is also evaluated by its loss: only a few are needed to see that predictions hold.
DEEP = 4


def sample_evaluated(waited: Mapping[int, int], *, count: int, seed: int) -> tuple[int, ...]:
    """``count`` of these uids, ascending, drawn in proportion to the square of the windows since they were drawn last.

    These count from ``LEAST_WAITED`` to ``MOST_WAITED``, so every uid is drawn with a positive chance in every window,
    and none for certain: nobody can read off when it will not be evaluated. By the square all come about equally often.

    Args:
        waited: windows since the last evaluation, by uid.
    """
    pool = sorted(waited)
    weights = [min(max(waited[uid], LEAST_WAITED), MOST_WAITED) ** 2 for uid in pool]
    return tuple(sorted(PCG64Stream(seed).weighted_sample(pool, weights, count)))


def evaluated_by_loss(sampled: Iterable[int], *, seed: int) -> frozenset[int]:
    """One in ``DEEP`` of the drawn uids, at least one."""
    order = sorted(sampled, key=lambda uid: derive("evaluated-by-loss", seed, uid))
    return frozenset(order[: math.ceil(len(order) / DEEP)])


class ChosenPeers(NamedTuple):
    """A peer list: uids whose updates are gathered, ascending; their substitutes in the order of use; and uids whose
    updates are only measured, ascending."""

    peers: tuple[int, ...]
    reserve: tuple[int, ...]
    probation: tuple[int, ...]


def first_peers(
    candidates: Iterable[int], incentive: Mapping[int, float], *, active: Sequence[int], at_most: int, reserve: int
) -> ChosenPeers:
    """The first list of a run in which peers need not prove themselves.

    Candidates are ordered by falling incentive on chain, then active ones first, then by uid.
    """
    lively = set(active)
    return _cut(
        sorted(set(candidates), key=lambda uid: (-incentive.get(uid, 0.0), uid not in lively, uid)), at_most, reserve
    )


def next_peers(
    active: Iterable[int], weights: Mapping[int, float], *, at_least: int, at_most: int, reserve: int, seed: int
) -> ChosenPeers | None:
    """A later list of such a run: active miners by falling weight; None, so that the old list stays, if fewer than
    ``at_least``.

    The seed orders equal weights, such as those of newcomers.
    """
    ranked = sorted(set(active), key=lambda uid: (-weights.get(uid, 0.0), derive("peer", seed, uid)))
    return None if len(ranked) < at_least else _cut(ranked, at_most, reserve)


def earned_peers(
    active: Iterable[int],
    proven: Mapping[int, bool | None],
    merit: Mapping[int, float],
    *,
    listed: Iterable[int],
    at_most: int,
    reserve: int,
    seed: int,
    turn: int = 0,
) -> ChosenPeers:
    """A list on which miners must earn their place: the proven ones, by falling merit; never a known zero.

    The reserve and some of the other active miners are on probation (``on_probation``). A miner on the present list
    that is not judged yet stays, behind all others: a leader that has lost its scores empties no list.

    Args:
        turn: of those on probation.
        proven: whether a miner is known to help (True) or known not to (False); missing or None: not judged yet.
        listed: uids on the present list.
        seed: orders equal merits.
    """
    lively, present = set(active), set(listed)
    earned = [uid for uid in lively if proven.get(uid)]
    kept = [uid for uid in lively & present if proven.get(uid) is None]

    def rank(uid: int) -> tuple[float, int]:
        return -merit.get(uid, 0.0), derive("peer", seed, uid)

    chosen = _cut([*sorted(earned, key=rank), *sorted(kept, key=rank)], at_most, reserve)
    others = on_probation(lively.difference(chosen.peers, chosen.reserve), proven, at_most=at_most, turn=turn)
    return chosen._replace(probation=tuple(sorted({*chosen.reserve, *others})))


def on_probation(
    waiting: Iterable[int], proven: Mapping[int, bool | None], *, at_most: int, turn: int
) -> tuple[int, ...]:
    """Those of the miners ``waiting`` for a place that are measured, ascending.

    They are as many as a list has places, and at least ``FEWEST_ON_PROBATION``. Every validator fetches and measures
    each of them in each window, so their number must not grow with all uids: 256 updates of a model of 70 billion
    parameters are 320 GB. In each turn others are drawn, the same by every elector, known zeros last. So nobody stays
    for longer than others by not being judged.
    """
    order = sorted(set(waiting), key=lambda uid: (proven.get(uid) is False, derive("probation", turn, uid)))
    return tuple(sorted(order[: max(at_most, FEWEST_ON_PROBATION)]))


def _cut(ranked: Sequence[int], at_most: int, reserve: int) -> ChosenPeers:
    """The first ones are peers, the next ones the reserve; the others are on probation."""
    return ChosenPeers(
        tuple(sorted(ranked[:at_most])), tuple(ranked[at_most : at_most + reserve]), tuple(sorted(ranked[at_most:]))
    )
