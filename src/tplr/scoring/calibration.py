"""Calibration: the part of a miner's predicted gain that shows on held-out pages and that its work explains.

Nobody knows these pages before the window ends. Most gradients that predict a gain are of pages that miners do know
(``gain.py``), and a gradient predicts more than a long step gains. Where miners choose the length of their steps,
multiplying an update multiplies its predicted gain. Four comparisons find such gain, each relative to what is usual
for all miners; the smallest factor counts:

    by loss       measured gains, of a sample of the updates, with those predicted by the held-out gradient
    by gradient   gains by the held-out gradient alone, of all updates, with predicted gains
    by middle     gains by a gradient after half of the window's step, of all updates, with predicted gains: see
                  ``overshoot.py``
    by length     predicted gains, of all updates, with the squared lengths of their steps

Only included updates set what is usual, so miners on probation, of which anybody can have many, do not affect it. Each
factor is the smaller one of all measured and of the included updates: no newcomer is trusted, and honest work on
probation does not make up for what is paid later. A miner sets its standard errors by gradient and by length only by
the lengths of its steps, so gains that vary from window to window hide nothing.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tplr.schemas import Evaluation
from tplr.scoring.measures import NORMAL, SIGNIFICANT, measured_gain

# Share of the usual ratio of measured to predicted gain from which there is no loss: honest miners' ratios vary, too.
CALIBRATED = 0.5
# Share of the usual gain of steps of a length from which there is no loss: honest miners' ratios vary here, too.
EXPLAINED = 0.9


class EvaluatedUpdate(NamedTuple):
    """A miner's update whose effect on the loss was measured.

    Attributes:
        predicted: gain of the whole step by the held-out gradient, as a share of the loss (``Alignment.unit``).
        included: whether the window's included set contains it.
    """

    evaluation: Evaluation
    predicted: float
    included: bool


class Calibration(NamedTuple):
    """The factors of a miner, in [0, 1]. ``by_length`` is None where lengths are not compared."""

    by_loss: float
    by_gradient: float
    by_middle: float
    by_length: float | None = None

    @property
    def value(self) -> float:
        """The smallest factor."""
        return min(one for one in self if one is not None)


def by_loss(evaluated: Mapping[int, Sequence[EvaluatedUpdate]]) -> dict[int, float]:
    """Return measured over predicted gain by uid, relative to what is usual, in [0, 1]: the smaller factor of two.

    A factor is ``(measured + SIGNIFICANT * error) / (CALIBRATED * usual * predicted)``, clipped, with sums over a
    uid's evaluations; ``usual`` is the median of ``measured / predicted`` over the miners' included updates. So neither
    chance lowers it, nor the curvature that makes every measured gain smaller than predicted. ``error`` is the standard
    error of ``measured`` from the spread of the sequences, times ``_scatter``. The error of a loss that is not finite
    counts as 0. A factor is 1 without an evaluation, or if ``usual`` is not positive.
    """
    known = {uid: [one for one in found if one.predicted > 0] for uid, found in sorted(evaluated.items())}
    included = {uid: [one for one in found if one.included] for uid, found in known.items()}
    ratios = [_measured(found) / _predicted(found) for found in included.values() if found]
    usual = statistics.median(ratios) if ratios else 0.0
    if usual <= 0:
        return dict.fromkeys(evaluated, 1.0)
    scatter = _scatter([one for found in included.values() for one in found], usual)

    def factor(updates: Sequence[EvaluatedUpdate]) -> float:
        if not updates:
            return 1.0
        error = scatter * math.sqrt(math.fsum(_error(one.evaluation) ** 2 for one in updates))
        upper = _measured(updates) + SIGNIFICANT * error
        return max(0.0, min(1.0, upper / (CALIBRATED * usual * _predicted(updates))))

    return {uid: min(factor(known[uid]), factor(included[uid])) for uid in evaluated}


def _measured(updates: Iterable[EvaluatedUpdate]) -> float:
    return math.fsum(measured_gain(one.evaluation) for one in updates)


def _predicted(updates: Iterable[EvaluatedUpdate]) -> float:
    return math.fsum(one.predicted for one in updates)


def _error(measured: Evaluation) -> float:
    """Return the standard error of the measured gain, from its sequences; 0 if the loss after is not finite."""
    change = measured.held_out
    return 0.0 if change.after is None else change.error / change.before


def _scatter(included: Sequence[EvaluatedUpdate], usual: float) -> float:
    """Return by how much measured gains differ from ``usual * predicted``, over their standard errors; at least 1.

    The ratio of measured to predicted gain also differs between windows, by several standard errors. The value is a
    median over the included updates, so fewer than half of them can't change it much. (Birge, "The Calculation of
    Errors by the Method of Least Squares", Physical Review 40 (1932), with a robust spread.)
    """
    differences = [(measured_gain(one.evaluation) - usual * one.predicted, _error(one.evaluation)) for one in included]
    in_errors = [abs(difference) / error for difference, error in differences if error > 0]
    return max(1.0, NORMAL * statistics.median(in_errors)) if in_errors else 1.0


def by_gradient(held_out: np.ndarray, gains: np.ndarray, lengths: np.ndarray, included: np.ndarray) -> np.ndarray:
    """Return each miner's gain by the held-out gradient over its predicted gain, relative to what is usual.

    It is the smaller factor of two. A factor is ``(held_out + SIGNIFICANT * error) / (usual * predicted)``, clipped to
    [0, 1], with sums over a miner's windows; ``usual`` is the median of ``held_out / predicted`` over the miners'
    included updates. The noise of a gradient along a step is proportional to the step's length, and the same for all
    directions. So ``error`` is ``_spread`` times the root of the sum of squared lengths. A factor is 1 without a
    positive predicted gain, if ``usual`` is not positive, or before any miner has two windows in succession.

    Args:
        held_out, gains: of measured updates by the held-out gradient alone and by all (``predicted_gains``), float64
            [windows, miners], NaN where there is none. They are equal in a window without tests.
        lengths: of their steps, float64 [windows, miners], above 0. All three are scaled by ``even_scales``.
        included: whether the window's included set contains the update, bool [windows, miners].
    """
    usual, known = _usual_share(held_out, gains, included), np.isfinite(gains)
    tested = (known & (held_out != gains)).any(axis=1, keepdims=True)
    spread = _spread(np.where(included & tested, (held_out - usual * gains) / lengths, np.nan))
    if usual <= 0 or spread is None:
        return np.ones(gains.shape[1])
    errors = spread * lengths
    return _smaller(
        _factors(held_out, gains, share=usual, errors=errors, gains=gains, where=where) for where in (known, included)
    )


def by_length(
    gains: np.ndarray, lengths: np.ndarray, *, scales: np.ndarray, included: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return each miner's predicted gain over what is usual for steps of their length, in [0, 1].

    More inner steps make a step longer and, if the noise of gradients dominates, also closer to the gradient. With Muon
    an honest update's gain then grows with the square of its length; multiplying an update multiplies its gain only
    once. A factor is ``(gain + SIGNIFICANT * error) / (EXPLAINED * usual * length**2)``, clipped, with sums over a
    miner's windows, and the smaller one of two as in ``by_gradient``. ``usual`` is the lower quartile of ``gain /
    length**2`` over the miners' included updates in the same windows, because lengths may grow during a run, weighted
    by their credits: this ratio is large for short steps, and only miners with three quarters of all credit could lower
    the factors of honest ones. Uids that send the same update share one credit, so their number changes nothing. As in
    ``by_gradient``, ``error`` is ``_spread`` times the root of the sum of squared lengths, scaled as the gains are. A
    factor is 1 without a positive predicted gain, if nobody has credit, or before any miner has two windows in
    succession.

    Args:
        gains: predicted gains, scaled by ``even_scales``, float64 [windows, miners], NaN where there is none.
        lengths: of the steps, float64 [windows, miners], above 0 and at most about 1.
        scales: ``even_scales``, float64 [windows, 1].
        included: whether the window's included set contains the update, bool [windows, miners].
        weights: credit times the own-pages factor, float64 [miners], at least 0.
    """
    squares, noise = np.square(lengths), lengths * scales

    def factors(where: np.ndarray) -> np.ndarray:
        usual = _usual_ratios(np.where(included, gains, 0.0), np.where(included, squares, 0.0), where, weights)
        spread = _spread(np.where(included, (gains - usual * squares) / noise, np.nan))
        if spread is None:
            return np.ones(len(usual))
        return _factors(gains, squares, share=EXPLAINED * usual, errors=spread * noise, gains=gains, where=where)

    return _smaller(factors(where) for where in (np.isfinite(gains), included))


def _usual_ratios(gains: np.ndarray, squares: np.ndarray, where: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return for each miner the lower quartile of all miners' gain over squared length in its windows; NaN without one.

    Args:
        gains, squares: of included updates, else 0; float64 [windows, miners].
        where: a miner's windows, bool [windows, miners].
        weights: of the miners in the quartile, float64 [miners].
    """
    sums, sizes = where.T.astype(np.float64) @ gains, where.T.astype(np.float64) @ squares
    found = np.full(len(weights), np.nan)
    for i, (mine, size) in enumerate(zip(sums, sizes, strict=True)):
        sets = (mine > 0) & (weights > 0)
        if sets.any():
            found[i] = _lower_quartile(mine[sets] / size[sets], weights=weights[sets])
    return found


def _smaller(factors: Iterable[np.ndarray]) -> np.ndarray:
    """Return the smaller factor of each miner."""
    return np.minimum.reduce([*factors])


def _factors(
    found: np.ndarray,
    base: np.ndarray,
    *,
    share: float | np.ndarray,
    errors: np.ndarray,
    gains: np.ndarray,
    where: np.ndarray,
) -> np.ndarray:
    """Return ``(found + SIGNIFICANT * error) / (share * base)`` of each miner, clipped to [0, 1], over sums of windows.

    It is 1 without a positive predicted gain or share.

    Args:
        found, base, gains: [windows, miners]; ``gains`` are the predicted ones.
        share: of each miner; NaN if it is unknown.
        errors: standard errors of ``found``.
        where: the windows that count, bool [windows, miners].
    """
    upper = _sums(found, where) + SIGNIFICANT * np.sqrt(_sums(np.square(errors), where))
    limit = share * _sums(base, where)
    limited = (_sums(gains, where) > 0) & (limit > 0)
    return np.clip(np.divide(upper, limit, out=np.ones(len(upper)), where=limited), 0.0, 1.0)


def _lower_quartile(values: np.ndarray, *, weights: np.ndarray) -> float:
    """Return the smallest value up to which at least a quarter of the weight lies."""
    order = np.argsort(values, kind="stable")
    weight = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(weight, weight[-1] / 4)])


def _sums(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where, values, 0.0).sum(axis=0)


def noise_of(held_out: np.ndarray, gains: np.ndarray, lengths: np.ndarray, included: np.ndarray) -> float | None:
    """Return the standard deviation of ``held_out / length`` around what is usual for ``gains``; None without one.

    The arguments are those of ``by_gradient``.
    """
    usual = _usual_share(held_out, gains, included)
    return _spread(np.where(included, (held_out - usual * gains) / lengths, np.nan))


def _usual_share(held_out: np.ndarray, gains: np.ndarray, included: np.ndarray) -> float:
    """Return the median of ``held_out / gain`` over the miners, by sums over their included updates; 0 without one."""
    found, sums = _sums(held_out, included), _sums(gains, included)
    ratios = found[sums > 0] / sums[sums > 0]
    return float(np.median(ratios)) if len(ratios) else 0.0


def _spread(differences: np.ndarray) -> float | None:
    """Return the standard deviation of these numbers, by the median of successive differences; None without one.

    So trends do not count, and numbers of a few miners hardly do.

    Args:
        differences: float64 [windows, miners], oldest first; NaN where there is none.
    """
    steps = np.abs(np.diff(differences, axis=0))
    known = steps[np.isfinite(steps)]
    return NORMAL * float(np.median(known)) / math.sqrt(2) if len(known) else None
