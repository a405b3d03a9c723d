"""Formulas for measures from losses, which both profiles use, and for the factors of a hardened score."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tplr.schemas import Evaluation, LossChange

# A difference of this many standard errors counts in full. Chance exceeds it in 1 of 44 cases for each sign.
SIGNIFICANT = 2.0
# Relative improvement of a loss that is not finite.
WORST = -1.0
# Mean own-pages indicator above which the factor is positive, and from which it is 1.
OWN_PAGES_LOW, OWN_PAGES_HIGH = 0.25, 0.5
# The same if only losses can be compared, with ``SIGNIFICANT`` standard errors added: an honest miner with little
# effort has a mean of about 0.
LOSS_LOW, LOSS_HIGH = -0.2, 0.0
# Smallest standard deviation of an indicator by loss: its value by chance alone.
LOSS_SPREAD = 1 / SIGNIFICANT
# Share of the usual ratio of measured to predicted gain from which there is no loss: honest miners' ratios vary, too.
CALIBRATED = 0.5
# A normal variable's standard deviation, divided by the median of its magnitude.
NORMAL = 1.4826


def relative_improvement(before: float, after: float | None) -> float:
    """Return ``max(WORST, (before - after) / before)``; ``WORST`` if the loss after is not finite (None)."""
    return WORST if after is None else max(WORST, (before - after) / before)


def gain(change: LossChange) -> float:
    """Return the relative improvement of the loss."""
    return relative_improvement(change.before, change.after)


def measured_gain(measured: Evaluation) -> float:
    """Return the relative improvement on the held-out pages."""
    return gain(measured.held_out)


def loss_indicator(assigned: LossChange, held_out: LossChange) -> float:
    """Return an indicator in [-1, 1] that the update lowers the loss more on its assigned pages than on held-out ones.

    It is ``difference / (SIGNIFICANT * standard error)`` of the relative improvements, clipped. It replaces the
    own-pages test (``scoring/own_pages.py``) if there are too few other updates to compare with.
    """
    if assigned.after is None or held_out.after is None:
        return -1.0
    difference = gain(assigned) - gain(held_out)
    error = math.hypot(assigned.error / assigned.before, held_out.error / held_out.before)
    if error == 0:
        return math.copysign(1.0, difference) if difference else 0.0
    return max(-1.0, min(1.0, difference / (SIGNIFICANT * error)))


def own_pages_factor(tests: Sequence[float], by_loss: Sequence[float] = ()) -> float:
    """Return ``(mean - LOW) / (HIGH - LOW)`` of a miner's own-pages tests, clipped to [0, 1]; 0 before the first test.

    Args:
        by_loss: values of ``loss_indicator``, which count only if there are no tests. One of two sets of pages may be
            easier to learn by chance, so only a mean that is significantly below zero lowers the factor.
    """
    if tests:
        return _clipped(math.fsum(tests) / len(tests), OWN_PAGES_LOW, OWN_PAGES_HIGH)
    if not by_loss:
        return 0.0
    # One test shows no spread, so use 1, the largest possible spread of an indicator in [-1, 1].
    spread = max(LOSS_SPREAD, statistics.stdev(by_loss) if len(by_loss) > 1 else 1.0)
    most = math.fsum(by_loss) / len(by_loss) + SIGNIFICANT * spread / math.sqrt(len(by_loss))
    return _clipped(most, LOSS_LOW, LOSS_HIGH)


def _clipped(mean: float, low: float, high: float) -> float:
    return max(0.0, min(1.0, (mean - low) / (high - low)))


def calibrations(evaluated: Mapping[int, Iterable[tuple[Evaluation, float]]]) -> dict[int, float]:
    """Return measured over predicted gain by uid, relative to the median of all uids, in [0, 1].

    The value is ``min(1, (measured + SIGNIFICANT * error) / (CALIBRATED * usual * predicted))`` with sums over a uid's
    evaluations; ``usual`` is the median of ``measured / predicted``. So neither chance lowers it, nor the curvature
    that makes every measured gain smaller than predicted. ``error`` is the standard error of ``measured`` from the
    spread of the sequences, times ``_scatter``. The error of a loss that is not finite counts as 0.

    Args:
        evaluated: each uid's evaluations, with the predicted gain of the same update.
    """
    known = {uid: [one for one in pairs if one[1] > 0] for uid, pairs in sorted(evaluated.items())}
    measured = {uid: math.fsum(measured_gain(one) for one, _ in pairs) for uid, pairs in known.items() if pairs}
    predicted = {uid: math.fsum(one for _, one in known[uid]) for uid in measured}
    usual = statistics.median(measured[uid] / predicted[uid] for uid in measured) if measured else 0.0
    if usual <= 0:
        return dict.fromkeys(evaluated, 1.0)
    scatter = _scatter([one for pairs in known.values() for one in pairs], usual)
    found = {}
    for uid, total in measured.items():
        error = scatter * math.sqrt(math.fsum(_error(one) ** 2 for one, _ in known[uid]))
        found[uid] = max(0.0, min(1.0, (total + SIGNIFICANT * error) / (CALIBRATED * usual * predicted[uid])))
    return {uid: found.get(uid, 1.0) for uid in evaluated}


def _error(measured: Evaluation) -> float:
    """Return the standard error of the measured gain, from its sequences; 0 if the loss after is not finite."""
    change = measured.held_out
    return 0.0 if change.after is None else change.error / change.before


def _scatter(evaluated: Iterable[tuple[Evaluation, float]], usual: float) -> float:
    """Return by how much measured gains differ from ``usual * predicted``, over their standard errors; at least 1.

    The ratio of measured to predicted gain also differs between windows, by several standard errors. The value is a
    median over all evaluations, so fewer than half of them can't change it much; those of miners on probation count,
    too. (Birge, "The Calculation of Errors by the Method of Least Squares",
    Physical Review 40 (1932), with a robust spread.)
    """
    known = [(measured_gain(one) - usual * predicted, _error(one)) for one, predicted in evaluated]
    found = [abs(difference) / error for difference, error in known if error > 0]
    return max(1.0, NORMAL * statistics.median(found)) if found else 1.0
