"""The own-pages test: did a miner train on the pages that it was assigned?

Its validator takes the gradient on these pages, and aligns it with the updates of *all* miners. Pages differ, but they
differ for everybody alike; the one that trained on them stands out among all.

With products a_j with the gradient on the pages, and b_j with that on held-out pages, all over the updates' norms:

    e_j = a_j - r * b_j              r: weighted median of a_j / b_j over the others
    t_i = (e_i - E[e_i | others]) / (standard deviation given the others)
    z(t) = t * (1 - 1 / (4 n)) / sqrt(1 + t**2 / (2 n))           with n + 1 others
    indicator = clip(z(t_i) / z(FULL), -1, 1)

The chance in e is that of one gradient in the directions of all updates, so its covariance is their Gram matrix R, and
what is expected of e_i follows from those of the others: ``E = R_io R_oo^-1 e_o``, with the variance
``R_ii - R_io R_oo^-1 R_oi`` times a common factor, found from the others' own residuals (Rasmussen, Williams, "Gaussian
Processes for Machine Learning" (2006), equations 2.19 and 5.12). With few others that factor is uncertain; z is normal
where t is Student's (Abramowitz, Stegun, "Handbook of Mathematical Functions" (1964), 26.7.8).
"""

import math
from collections.abc import Sequence

import numpy as np

from tplr.scoring.credit import SHORTEST, Aligned, gram_of

# This many standard deviations are a full indicator. Half as many are no proof: pages of one kind are more alike than
# the model of chance has it, and those who did not train on them spread by up to two.
FULL = 4.0
# With fewer others nothing is known of chance.
FEWEST_OTHERS = 2
# Who says so much alike beyond the common gradient may have copied: it is no one to compare with.
TOO_ALIKE = 0.4
RIDGE = 0.1
# The median of a normal variable's magnitude is its standard deviation over this.
NORMAL = 1.4826
TINY = 1e-12


def indicator(uid: int, own_products: Sequence[float], alignment: Aligned) -> float | None:
    """Whether an update was trained on the pages, in [-1, 1]; None if there are too few others to tell.

    Args:
        own_products: of all updates with the gradient on the pages of ``uid``, in the order of ``alignment.uids``.
        alignment: of the same updates with the gradient on held-out pages, and with each other.
    """
    gram = gram_of(alignment)
    (known,) = np.nonzero(np.diag(gram) > SHORTEST)
    uids = [alignment.uids[place] for place in known.tolist()]
    if uid not in uids:
        return None
    mine, gram = uids.index(uid), gram[np.ix_(known, known)]
    length = np.sqrt(np.diag(gram))
    cosines = gram / np.outer(length, length)
    on_pages, held_out = (np.asarray(one)[known] / length for one in (own_products, alignment.products))
    others = _independent(mine, cosines, held_out)
    if others.sum() < FEWEST_OTHERS:
        return None
    rest = on_pages - _slope(on_pages[others], held_out[others]) * held_out
    inverse = np.linalg.inv(cosines[np.ix_(others, others)] + RIDGE * np.eye(others.sum()))
    from_others = inverse @ cosines[mine, others]
    variance = 1 + RIDGE - cosines[mine, others] @ from_others
    of_others = (inverse @ rest[others]) / np.sqrt(np.diag(inverse))
    spread = NORMAL * float(np.median(np.abs(of_others))) * math.sqrt(max(variance, TINY))
    t = float((rest[mine] - rest[others] @ from_others) / max(spread, TINY))
    n = int(others.sum()) - 1
    return max(-1.0, min(1.0, _normal(t, n) / _normal(FULL, n)))


def _independent(mine: int, cosines: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Which others are no copies of one update, or it of them: bool [updates]."""
    count = len(gains)
    explained = gains @ np.linalg.solve(cosines + RIDGE * np.eye(count), gains)
    rest = cosines + RIDGE * np.eye(count) - np.outer(gains, gains) / max(explained, TINY)
    size = np.sqrt(np.maximum(np.diag(rest), TINY))
    found = rest[mine] / (size[mine] * size) < TOO_ALIKE
    found[mine] = False
    return found


def _slope(on_pages: np.ndarray, held_out: np.ndarray) -> float:
    """Weighted median of the ratios: the slope of least absolute deviation through the origin."""
    some = np.abs(held_out) > TINY
    if not some.any():
        return 0.0
    ratios, weights = on_pages[some] / held_out[some], np.abs(held_out[some])
    order = np.argsort(ratios, kind="stable")
    reached = np.cumsum(weights[order])
    return float(ratios[order][np.searchsorted(reached, reached[-1] / 2)])


def _normal(t: float, n: int) -> float:
    """What a standard normal number exceeds as often as Student's, of ``n`` degrees of freedom, exceeds ``t``."""
    return t * (1 - 1 / (4 * n)) / math.sqrt(1 + t * t / (2 * n))
