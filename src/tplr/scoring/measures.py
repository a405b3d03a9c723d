"""Formulas from losses to measures that both profiles use, and the factors of a hardened score."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tplr.schemas import Evaluation, LossChange

# A difference of this many standard errors counts in full. Chance exceeds it in 1 of 44 cases, for either sign.
SIGNIFICANT = 2.0
# Relative improvement of a loss that is not finite.
WORST = -1.0
# Mean own-pages indicator from which something is earned, and from which all is.
OWN_PAGES_LOW, OWN_PAGES_HIGH = 0.25, 0.5
# The same where only losses can be compared, with ``SIGNIFICANT`` standard errors added: an honest miner of little
# effort has a mean of about 0.
LOSS_LOW, LOSS_HIGH = -0.2, 0.0
# Least standard deviation of an indicator by loss: what chance alone gives it.
LOSS_SPREAD = 1 / SIGNIFICANT
# Part of the usual ratio of measured to predicted gain that loses nothing: ratios of honest miners differ, too.
CALIBRATED = 0.5


def relative_improvement(before: float, after: float | None) -> float:
    """``max(WORST, (before - after) / before)``; ``WORST`` if the loss after is not finite (None)."""
    return WORST if after is None else max(WORST, (before - after) / before)


def gain(change: LossChange) -> float:
    """Relative improvement of the loss."""
    return relative_improvement(change.before, change.after)


def measured_gain(measured: Evaluation) -> float:
    """Relative improvement on the held-out pages."""
    return gain(measured.held_out)


def loss_indicator(assigned: LossChange, held_out: LossChange) -> float:
    """Whether the update lowers the loss on its assigned pages more than on held-out ones, in [-1, 1].

    ``difference / (SIGNIFICANT * standard error)`` of the relative improvements, clipped. It stands in for the
    own-pages test (``scoring/own_pages.py``) where too few other updates are there to compare with.
    """
    if assigned.after is None or held_out.after is None:
        return -1.0
    difference = gain(assigned) - gain(held_out)
    error = math.hypot(assigned.error / assigned.before, held_out.error / held_out.before)
    if error == 0:
        return math.copysign(1.0, difference) if difference else 0.0
    return max(-1.0, min(1.0, difference / (SIGNIFICANT * error)))


def own_pages_factor(tests: Sequence[float], by_loss: Sequence[float] = ()) -> float:
    """``(mean - LOW) / (HIGH - LOW)`` of a miner's own-pages tests, clipped to [0, 1]; 0 before the first one.

    Args:
        by_loss: of ``loss_indicator``, which count only if there are no tests. Which of two sets of pages is easier to
            learn is chance, and the same for all miners of a window; so only a mean below zero beyond chance costs.
    """
    if tests:
        return _clipped(math.fsum(tests) / len(tests), OWN_PAGES_LOW, OWN_PAGES_HIGH)
    if not by_loss:
        return 0.0
    # One test tells no spread: 1 is the largest that an indicator in [-1, 1] can have.
    spread = max(LOSS_SPREAD, statistics.stdev(by_loss) if len(by_loss) > 1 else 1.0)
    most = math.fsum(by_loss) / len(by_loss) + SIGNIFICANT * spread / math.sqrt(len(by_loss))
    return _clipped(most, LOSS_LOW, LOSS_HIGH)


def _clipped(mean: float, low: float, high: float) -> float:
    return max(0.0, min(1.0, (mean - low) / (high - low)))


def calibrations(evaluated: Mapping[int, Iterable[tuple[Evaluation, float]]]) -> dict[int, float]:
    """Measured over predicted gain by uid, compared with the median of all uids, in [0, 1].

    ``min(1, (measured + SIGNIFICANT * its standard error) / (CALIBRATED * usual * predicted))`` of sums over a uid's
    evaluations; ``usual`` is the median of ``measured / predicted``. So chance costs nothing, nor does the curvature
    that makes every measured gain smaller than predicted. A loss that is not finite is no chance: its error counts 0.

    Args:
        evaluated: each uid's evaluations, with the predicted gain of the same update.
    """
    sums = {}
    for uid, pairs in sorted(evaluated.items()):
        known = [(measured, predicted) for measured, predicted in pairs if predicted > 0]
        if known:
            total = math.fsum(measured_gain(measured) for measured, _ in known)
            finite = [one.held_out for one, _ in known if one.held_out.after is not None]
            variance = math.fsum((one.error / one.before) ** 2 for one in finite)
            sums[uid] = total, math.sqrt(variance), math.fsum(predicted for _, predicted in known)
    usual = statistics.median(total / predicted for total, _, predicted in sums.values()) if sums else 0.0
    if usual <= 0:
        return dict.fromkeys(evaluated, 1.0)
    found = {
        uid: max(0.0, min(1.0, (total + SIGNIFICANT * error) / (CALIBRATED * usual * predicted)))
        for uid, (total, error, predicted) in sums.items()
    }
    return {uid: found.get(uid, 1.0) for uid in evaluated}
