"""Formulas from losses, reports and ratings to the factors of a score.

The documented profile has the formulas of the documented system. In the hardened profile only differences beyond chance
count, and no factor is negative.
"""

import math
from collections.abc import Iterable

from tplr.schemas import OUT_OF_SYNC, Evaluation
from tplr.seeds import Profile

# A difference of this many standard errors counts in full. Chance exceeds it in 1 of 44 cases, for either sign.
SIGNIFICANT = 2.0
# Relative improvement of a loss that is not finite.
WORST = -1.0
# Part of the upper third that earns the full gain: gradient scores of equal miners in one window spread by some 15 %.
ALIKE = 0.6
SYNC_SPAN = 5.0
SYNC_EXPONENT = 2.5


def relative_improvement(before: float, after: float | None) -> float:
    """``max(WORST, (before - after) / before)``; ``WORST`` if the loss after is not finite (None)."""
    return WORST if after is None else max(WORST, (before - after) / before)


def gradient_score(measured: Evaluation) -> float:
    """Relative improvement on the held-out pages."""
    return relative_improvement(measured.random_before, measured.random_after)


def gradient_sign(profile: Profile, measured: Evaluation) -> int:
    """Sign of the gradient score: 1, -1 or 0. Hardened: 0 also within ``SIGNIFICANT`` standard errors of zero."""
    error = measured.random_error / measured.random_before if profile == "hardened" else 0.0
    return _sign(gradient_score(measured), error)


def binary_indicator(profile: Profile, measured: Evaluation) -> float:
    """Whether the update helps more on the miner's assigned pages than on held-out ones, in [-1, 1].

    A miner that did not train on its assigned pages has no reason to be better there. Documented: 1 if the difference
    is positive, else -1. Hardened: ``difference / (SIGNIFICANT * standard error)``, clipped to [-1, 1], so that chance
    averages out.
    """
    own = relative_improvement(measured.own_before, measured.own_after)
    difference = own - gradient_score(measured)
    if profile == "documented":
        return 1.0 if difference > 0 else -1.0
    if measured.own_after is None or measured.random_after is None:
        return -1.0
    error = math.hypot(measured.own_error / measured.own_before, measured.random_error / measured.random_before)
    if error == 0:
        return float(_sign(difference, error))
    return max(-1.0, min(1.0, difference / (SIGNIFICANT * error)))


def gain(score: float, match: Iterable[float]) -> float:
    """``min(1, score / (ALIKE * upper_third))**4``, and 0 for a score of 0 or less.

    ``upper_third`` is the lowest score of the match's upper third. Ranks say who is better, the gain says by how much.
    Chance among equal miners, and a few miners far above all others, lower nobody's gain. A falling score never raises
    the upper third, so it lowers nobody else's gain.
    """
    if score <= 0:
        return 0.0
    ranked = sorted(match, reverse=True)
    enough = ALIKE * ranked[len(ranked) // 3]
    return (score / enough) ** 4 if score < enough else 1.0


def moving_average(old: float, new: float, alpha: float) -> float:
    """``(1 - alpha) * old + alpha * new``; it starts at 0, so that a few lucky evaluations are worth little."""
    return (1 - alpha) * old + alpha * new


def sync_score(behind: int) -> float:
    """``(1 - min(behind, 5) / 5) ** 2.5``; 0 for another model."""
    if behind == OUT_OF_SYNC:
        return 0.0
    return (1 - min(float(behind), SYNC_SPAN) / SYNC_SPAN) ** SYNC_EXPONENT


def base_score(profile: Profile, *, ordinal: float, gain: float, binary: float, sync: float, beta: float) -> float:
    """The score before penalties.

    Documented: ``ordinal * max(0, binary) * sync``, which may be negative. Hardened:
    ``ln(1 + e^(ordinal / beta)) * gain * max(0, binary) * sync``. Its rating is positive, so a newcomer, or the last of
    the honest miners, earns little, but not nothing.
    """
    rating = ordinal if profile == "documented" else _softplus(ordinal / beta) * gain
    return rating * max(0.0, binary) * sync


def _sign(value: float, error: float) -> int:
    if value == 0 or abs(value) <= SIGNIFICANT * error:
        return 0
    return 1 if value > 0 else -1


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
