"""Formulas for measures from losses, which both profiles use, and for the factors of a hardened score."""

import math
import statistics
from collections.abc import Sequence

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
