"""Selects the uids that a validator evaluates and the peers whose updates are gathered."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# Minimum and maximum of the waiting windows that count in the draw of evaluated uids.
LEAST_WAITED, MOST_WAITED = 2, 20
# Minimum number of miners on probation in addition to the reserve, for short peer lists.
FEWEST_ON_PROBATION = 16
# One of this many drawn uids is also evaluated by its loss: a few are enough to check the predictions.
UIDS_PER_LOSS_EVALUATION = 4


def sample_evaluated(waited: Mapping[int, int], *, count: int, seed: int) -> tuple[int, ...]:
    """Draw ``count`` uids in proportion to the square of the windows since their last draw; return them ascending.

    The windows are limited to ``LEAST_WAITED`` and ``MOST_WAITED``, so in every window each uid has a positive
    probability, and none is certain if there are more than ``count``: no miner can predict a window without evaluation.
    With the square all uids are drawn about equally often.

    Args:
        waited: windows since the last evaluation, by uid.
    """
    pool = sorted(waited)
    weights = [min(max(waited[uid], LEAST_WAITED), MOST_WAITED) ** 2 for uid in pool]
    return tuple(sorted(PCG64Stream(seed).weighted_sample(pool, weights, count)))


def evaluated_by_loss(sampled: Iterable[int], *, seed: int) -> frozenset[int]:
    """Return one in ``UIDS_PER_LOSS_EVALUATION`` of the drawn uids, at least one."""
    order = sorted(sampled, key=lambda uid: derive("evaluated-by-loss", seed, uid))
    return frozenset(order[: math.ceil(len(order) / UIDS_PER_LOSS_EVALUATION)])


class ChosenPeers(NamedTuple):
    """A peer list: uids whose updates are gathered, ascending; reserve uids in order of use; and uids whose updates are
    only measured, ascending."""

    peers: tuple[int, ...]
    reserve: tuple[int, ...]
    probation: tuple[int, ...]


def first_peers(
    candidates: Iterable[int], incentive: Mapping[int, float], *, active: Sequence[int], at_most: int, reserve: int
) -> ChosenPeers:
    """Return the first peer list of a run without probation.

    Candidates are ordered by falling incentive on chain, then active ones first, then by uid.
    """
    lively = set(active)
    return _cut(
        sorted(set(candidates), key=lambda uid: (-incentive.get(uid, 0.0), uid not in lively, uid)), at_most, reserve
    )


def next_peers(
    active: Iterable[int], weights: Mapping[int, float], *, at_least: int, at_most: int, reserve: int, seed: int
) -> ChosenPeers | None:
    """Return a later list of such a run: active miners by falling weight. None, which keeps the old list, if there are
    fewer than ``at_least``.

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
    """Return a peer list with earned places: the proven miners, by falling merit, and never a known zero.

    The reserve and some of the other active miners are on probation (``on_probation``). A miner on the current list
    that is not judged yet keeps a place after all others, so that electors without its scores do not empty the list.

    Args:
        turn: turn of the miners on probation.
        proven: True if a miner is known to help, False if it is known not to; missing or None: not judged yet.
        listed: uids on the current list.
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
    """Return the miners ``waiting`` for a place that are measured in this turn, ascending.

    Their number is that of a list's places, but at least ``FEWEST_ON_PROBATION``. Every validator fetches and measures
    each of them in each window, so their number must not grow with the number of uids: 256 updates of a model of 70
    billion parameters are 250 GB. Each turn draws other miners, the same for every elector, known zeros last. So no
    miner can stay longer than others by avoiding judgement.
    """
    order = sorted(set(waiting), key=lambda uid: (proven.get(uid) is False, derive("probation", turn, uid)))
    return tuple(sorted(order[: max(at_most, FEWEST_ON_PROBATION)]))


def _cut(ranked: Sequence[int], at_most: int, reserve: int) -> ChosenPeers:
    """Cut a ranking: the first uids are peers, the next ones the reserve; the others are on probation."""
    return ChosenPeers(
        tuple(sorted(ranked[:at_most])), tuple(ranked[at_most : at_most + reserve]), tuple(sorted(ranked[at_most:]))
    )
