"""Finds miners whose steps overshoot: along the window's step their gain vanishes faster than other miners'.

A step along a steep direction has a large slope, and overshoots, so that the next window's gradient pays for the way
back. The gradient in the middle of the step shows what a whole step gains: it is the midpoint rule for the integral
along the step, exact to second order (Aumann and Shapley, "Values of Non-Atomic Games", 1974). Its products do not
replace the gains that are paid, because they have more noise, and honest ones are smaller. They are compared with them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tplr.scoring.calibration import noise_of
from tplr.scoring.credit import even_scales
from tplr.scoring.measured_window import MeasuredWindow

# A miner overshoots if less than this share of what is usual is left of its gain in the middle of the steps.
OVERSHOOTING = 0.25
# Late in a run less than this may be usual, or nothing. A miner's difference from it is then divided by this instead.
LEAST_USUAL = 0.05
# Number of standard errors in favour of a miner. Steep steps have large gains, beside which errors are small; with two,
# chance cost an honest miner its place late in a run.
ERRORS = 3.0
# Largest product in the middle of a window's step, over the window's largest gain, that is not scaled down.
MOST = 2.0


class Middle(NamedTuple):
    """A miner's gains in the middle of the steps over its predicted gains, relative to what is usual.

    Attributes:
        factor: in [0, 1], a factor of ``Calibration``.
        overshoots: whether so little is left beyond chance that its updates are not to be applied.
    """

    factor: float = 1.0
    overshoots: bool = False


class _Products(NamedTuple):
    """Scaled products of all miners, their standard errors, and whether they are included: [windows, miners] each."""

    middle: np.ndarray
    gains: np.ndarray
    errors: np.ndarray
    included: np.ndarray


def middles(windows: Sequence[MeasuredWindow], hotkeys: Mapping[int, str]) -> dict[int, Middle]:
    """Return how much of their gains these miners keep in the middle of the steps, by uid.

    A factor is ``(middle + ERRORS * error) / (usual * predicted)``, clipped to [0, 1], with sums over a miner's
    windows. ``usual`` is the median of ``middle / predicted`` over the included miners in the same windows, because
    how much is left in the middle depends on a window's whole step. Where it is below ``LEAST_USUAL``, or negative, as
    late in a run whose learning rate does not fall, the factor falls from 1 at ``usual * predicted`` to 0 at ``(usual -
    LEAST_USUAL) * predicted``. Errors are as in ``calibration.by_gradient``. The factor is the smaller of two: over all
    measured updates, also those that break a rule, and over those that counted.
    """
    if not windows or not hotkeys:
        return dict.fromkeys(hotkeys, Middle())
    pairs = np.array([[one.middle_and_gain(*miner) for miner in hotkeys.items()] for one in windows])
    counted = np.array([[bool(one.counts(*miner)) for miner in hotkeys.items()] for one in windows], dtype=bool)
    known = np.isfinite(pairs[..., 1])
    included = counted & known
    scales = even_scales([one.included_gains for one in windows])[:, None]
    lengths = scales * np.array([[one.length(uid) for uid in hotkeys] for one in windows])
    middle, gains = np.moveaxis(np.where(known[..., None], pairs, 0.0), 2, 0) * scales
    middle = _bounded(middle, gains, included)
    noise = noise_of(middle, gains, lengths, included)
    if noise is None:
        return dict.fromkeys(hotkeys, Middle())
    products = _Products(middle, gains, lengths * noise, included)
    found = [[_of_miner(i, where[:, i], products) for where in (known, included)] for i in range(len(hotkeys))]
    both = [Middle(min(one.factor for one in two), any(one.overshoots for one in two)) for two in found]
    return dict(zip(hotkeys, both, strict=True))


def _bounded(middle: np.ndarray, gains: np.ndarray, included: np.ndarray) -> np.ndarray:
    """Return the products in the middle; in a window whose products are far larger than its gains, all are scaled down.

    Otherwise one window with a far too long step would decide all sums.
    """
    largest, gain = (np.abs(np.where(included, one, 0.0)).max(axis=1, keepdims=True) for one in (middle, gains))
    return middle * np.minimum(1.0, np.divide(MOST * gain, largest, out=np.ones_like(gain), where=largest > 0))


def _of_miner(i: int, mine: np.ndarray, products: _Products) -> Middle:
    """Return the result of miner ``i`` over its windows ``mine``, bool [windows]."""
    middle, gains, errors, included = products
    theirs = included & mine[:, None]
    left, whole = (np.where(theirs, one, 0.0).sum(axis=0) for one in (middle, gains))
    gain = gains[mine, i].sum()
    if gain <= 0 or not (whole > 0).any():
        return Middle()
    usual = float(np.median(left[whole > 0] / whole[whole > 0]))
    upper = middle[mine, i].sum() + ERRORS * np.sqrt(np.square(errors[mine, i]).sum())
    share = 1 + float((upper / gain - usual) / max(usual, LEAST_USUAL))
    return Middle(min(1.0, max(0.0, share)), share < (OVERSHOOTING if usual >= LEAST_USUAL else 0.0))
