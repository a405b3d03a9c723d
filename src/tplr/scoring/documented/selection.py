"""Selects the uids that a validator evaluates: one bin of miners of similar score in each window."""

import itertools
from collections.abc import Iterable, Mapping

from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# With fewer miners per bin than this there is one bin: a bin of one or two miners would be evaluated all the time.
FEWEST_IN_BIN = 4


def evaluation_bins(pool: Iterable[int], finals: Mapping[int, float], bins: int) -> list[tuple[int, ...]]:
    """Divide the pool, by falling final score, into bins of nearly equal size; one bin while the pool is small."""
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
    """Return ``count`` uids of the pool, ascending, sampled by waiting time from the window's bin.

    A bin holds miners with similar scores, so that their ranks carry information. Uids that have waited for more than
    two rounds of the whole pool come first, regardless of their bin.

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
