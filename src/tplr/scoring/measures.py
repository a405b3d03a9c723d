"""What one evaluation says: formulas from losses, reports and ratings to the factors of a score.

Documented: the formulas of the documented system. Hardened: the same ideas, but only what is told from chance counts,
and no factor is ever negative.
"""

import math
from collections.abc import Iterable

from tplr.schemas import OUT_OF_SYNC, Evaluation
from tplr.seeds import Profile

# A difference counts in full if it is so many standard errors from zero: chance alone gives either sign in 1 of 44
# cases.
SIGNIFICANT = 2.0
# Losses that are not finite count as losing everything.
WORST = -1.0
# Gradient scores of equal miners in one window spread by some 15 %: above this part of another's, one is no worse.
ALIKE = 0.6
SYNC_SPAN = 5.0
SYNC_EXPONENT = 2.5


def relative_improvement(before: float, after: float | None) -> float:
    """(before - after) / before; ``WORST`` if the loss after is not finite, or worse than that."""
    return WORST if after is None else max(WORST, (before - after) / before)


def gradient_score(measured: Evaluation) -> float:
    """Relative improvement on the random pages."""
    return relative_improvement(measured.random_before, measured.random_after)


def gradient_sign(profile: Profile, measured: Evaluation) -> int:
    """Sign of the gradient score: 1, -1, or 0 if it is none. Hardened: or if it is not told from zero."""
    error = measured.random_error / measured.random_before if profile == "hardened" else 0.0
    return _sign(gradient_score(measured), error)


def binary_indicator(profile: Profile, measured: Evaluation) -> float:
    """1 if the update helps more on the miner's own pages than on random ones, -1 if less.

    A miner that did not train on the pages it was given has no reason to be better there. Documented: -1 unless it
    is better. Hardened: in proportion, if the difference is less than ``SIGNIFICANT`` standard errors: its average then
    says the same, and what is chance averages out.
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
    """How near a gradient score comes to the upper third of its match, in [0, 1]: ranks say who is better, not by how
    much.

    1 from ``ALIKE`` of that third's lowest on, so that chance among equal miners, or a few who are far above all others
    by whatever means, take nothing from anybody; below it, the fourth power of what is reached. A score that falls
    never raises the third, so nobody else's gain falls with it.
    """
    if score <= 0:
        return 0.0
    ranked = sorted(match, reverse=True)
    enough = ALIKE * ranked[len(ranked) // 3]
    return (score / enough) ** 4 if score < enough else 1.0


def moving_average(old: float, new: float, alpha: float) -> float:
    """(1 - alpha) * old + alpha * new: from 0 on, so that a few lucky evaluations are worth little."""
    return (1 - alpha) * old + alpha * new


def sync_score(behind: int) -> float:
    """(1 - min(steps behind, 5) / 5) ** 2.5; 0 for another model."""
    if behind == OUT_OF_SYNC:
        return 0.0
    return (1 - min(float(behind), SYNC_SPAN) / SYNC_SPAN) ** SYNC_EXPONENT


def base_score(profile: Profile, *, ordinal: float, gain: float, binary: float, sync: float, beta: float) -> float:
    """Rating times gain (hardened) times binary average times sync, before penalties.

    Documented: the rating's ordinal as it is, which may be negative. Hardened: ln(1 + e^(ordinal / beta)), which
    rises with the ordinal and is positive, so that who is new, or last among honest miners, earns little, not nothing.
    """
    rating = ordinal if profile == "documented" else _softplus(ordinal / beta) * gain
    return rating * max(0.0, binary) * sync


def _sign(value: float, error: float) -> int:
    if value == 0 or abs(value) <= SIGNIFICANT * error:
        return 0
    return 1 if value > 0 else -1


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
