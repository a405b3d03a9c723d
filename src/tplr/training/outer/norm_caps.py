"""Norm caps: the largest norm with which an update counts, for each tensor; and as how many updates a window counts.

A window's median alone would be controlled by its senders: a single peer, or half of them, could choose any norm. So a
window's cap is the usual one, the median of the last caps, unless more than three quarters of the window's norms are
above it, or below it. Then it is the quartile, but at most ``RISE`` times the usual cap and at least the usual cap over
``FALL``. If a quarter of the updates are honest, no number of others can move a cap beyond both the usual cap and all
honest norms. A cap never exceeds a bound that follows from the hparams. At a run's start most updates may be tiny or
large, so a run begins as if all its last caps had been a share of the bound (``first_cap``). That is a guess, and
honest norms may be many times as long, so in the first ``HISTORY`` steps a cap may rise by a factor of ``FIRST_REACH``
if all norms, at least three, are as long: a single short one prevents it. Caps are stored in units of the bound, so its
growth in a run's first windows changes them little. They are equal on all nodes: they are part of saved states and of
checkpoints.

Short updates of an honest direction help a little, so their senders have places, and may be more than three quarters.
So norms below ``SHORT`` of the usual cap do not lower it, if at least three others, and a fifth, are longer. They do
count against a higher cap: otherwise a few long updates could raise it where honest norms are short. If the step were
the sum divided by the number of updates, short ones would also shorten it, so it is divided by ``effective_count``.
"""

import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from tplr.compress.layout import TensorSpec
from tplr.hparams import SparselocoParams
from tplr.training.inner_optimizers import is_hidden_matrix
from tplr.training.schedule import learning_rate

HISTORY = 8  # windows whose caps count
# Largest factors by which a window's cap is above or below the usual one. Honest norms fall with the learning rate: in
# 200 rounds of a small model they needed no faster rise after the tenth round. Multiplied updates do.
RISE, FALL = 1.25, 2.0
# Usual cap at a run's start with an outer rate of 1, as a share of the bound. In a small model's first windows honest
# norms are 0.13 to 0.2 of it in hidden matrices, 0.4 in the embedding and 0.5 to 0.8 in the head; with a sixth of the
# inner steps 0.01 to 0.1.
FIRST = 0.125
# A first window's step is no longer than the bound: ``FIRST_REACH * FIRST`` is 1.
FIRST_REACH = 8.0
# Shorter norms, as a share of the usual cap, do not lower it. Honest ones may be a few times as long as the first cap;
# with an eighth those of a twentieth would lower it then, and with a quarter if honest ones are five times as long.
SHORT = 0.25
# Smallest cap, as a share of the bound, so that a cap recovers soon after a majority of tiny updates has lowered it.
LOWEST = 2.0**-10
# Bound of the RMS of Muon's step: 0.2 times the largest singular value after its iterations, about 1.2.
MUON_RMS = 0.25
# Older work in error feedback is left out of the bounds. With a decay of 0.95 it is 0.6 % of the sum over all windows,
# with 0.98 13 %, but only if every window moves every entry the same way and nothing is ever sent.
MOST_WINDOWS = 100


def no_history() -> torch.Tensor:
    """Return one tensor's cap history at the run's start: float32 [HISTORY], newest last; 0 for the first cap."""
    return torch.zeros(HISTORY)


def norm_bound(tensor: TensorSpec, constants: SparselocoParams, step: int) -> float:
    """Return the largest norm that counts at outer step ``step``: of inner steps that all move in one direction.

    AdamW moves an entry by about the learning rate at most, ``inner_steps`` times in a window. Muon can move a few
    entries by more, but a matrix by no more than ``MUON_RMS`` times the learning rate in root mean square. Error
    feedback contains everything not sent since the run's start; its windows count as independent, so their norms add
    like those of a random walk. Only the warm-up of a schedule counts. Every machine computes the same bits.
    """
    decay = constants.error_feedback_decay
    windows = math.sqrt(geometric_sum(decay * decay, min(step + 1, MOST_WINDOWS)))
    return _window_change(constants, step) * windows * _unit_norm(tensor, constants)


def largest_norm(tensor: TensorSpec, constants: SparselocoParams, step: int) -> float:
    """Return the largest norm of an honest update: as ``norm_bound``, but all windows move in one direction, too.

    It counts windows beyond ``step``: while no update is applied, as at a run's start, miners train on and the step
    stays, so error feedback holds more windows than steps.
    """
    windows = geometric_sum(constants.error_feedback_decay, MOST_WINDOWS)
    return _window_change(constants, step) * windows * _unit_norm(tensor, constants)


def _window_change(constants: SparselocoParams, step: int) -> float:
    """Return how far a window's inner steps move an entry: the learning rates' sum, or more."""
    schedule = constants.inner_learning_rate
    last = (step + 1) * constants.inner_steps - 1
    return constants.inner_steps * learning_rate(min(last, schedule.warmup_steps), schedule)


def _unit_norm(tensor: TensorSpec, constants: SparselocoParams) -> float:
    """Return the largest norm of a tensor's sent values after one inner step of learning rate 1."""
    if constants.inner_optimizer == "muon" and is_hidden_matrix(tensor.name, tensor.grid.shape):
        return MUON_RMS * math.sqrt(tensor.grid.rows * tensor.grid.cols)
    return math.sqrt(tensor.grid.chunks * tensor.k)


@functools.cache
def geometric_sum(ratio: float, terms: int) -> float:
    """Return ``1 + ratio + ratio**2 ...``; powers are rounded alike everywhere."""
    total, part = 0.0, 1.0
    for _ in range(terms):
        total += part
        part *= ratio
    return total


def first_cap(outer_rate: float) -> float:
    """Return the cap at a run's start, in units of the bound: a larger outer rate makes no first step longer."""
    return FIRST / max(1.0, outer_rate)


def window_cap(norms: Sequence[float], history: Sequence[float], *, first: bool = False) -> float:
    """Return a window's cap in units of the bound, representable as float32; without norms, the usual times ``RISE``.

    Args:
        norms: of the window's updates, in units of the bound; zeros do not count.
        history: the last caps, at least one (``last_caps``).
        first: whether it is one of the run's first ``HISTORY`` steps, in which it may rise to the shortest of three or
            more norms.
    """
    usual = max(LOWEST, statistics.median_low(history))
    lowest, highest = max(LOWEST, usual / FALL), min(1.0, usual * RISE)
    lengths = sorted(norm for norm in norms if norm > 0)
    if not lengths:
        return float(np.float32(highest))
    if first and len(lengths) >= 3:
        highest = min(1.0, max(highest, min(usual * FIRST_REACH, lengths[0])))
    long = [norm for norm in lengths if norm >= SHORT * usual]
    enough = len(long) >= max(3, len(lengths) / 5)
    lower, upper = _quartile(lengths), _quartile((long if enough else lengths)[::-1])
    return float(np.float32(min(max(min(max(usual, lower), upper), lowest), highest)))


def _quartile(ordered: Sequence[float]) -> float:
    """Return the first number up to which a quarter of them lie, in their order."""
    return ordered[math.ceil(len(ordered) / 4) - 1]


def effective_count(norms: Sequence[float]) -> float:
    """Return ``sum(norms) * sum(norms^2) / sum(norms^3)``, by which a sum of updates is divided; 1 without norms.

    It is the number of updates if their norms are equal, and smaller otherwise. If all have one direction, the quotient
    is as long as their mean weighted by squared norms: no longer than the longest, and no shorter than the plain mean.
    """
    longest = max(norms, default=0.0)
    if not longest:
        return 1.0
    shares = [norm / longest for norm in norms]  # whose powers are not too large
    squares = [one * one for one in shares]  # a library's power may round otherwise
    cubes = [one * square for one, square in zip(shares, squares, strict=True)]
    return math.fsum(shares) * math.fsum(squares) / math.fsum(cubes)


def last_caps(history: torch.Tensor, first: float) -> list[float]:
    """Return the caps in a history, oldest first; those before a run's start are ``first``."""
    return [one if one > 0 else first for one in history.tolist()]


def recorded(history: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the history after a window with this cap."""
    return torch.cat([history[1:], torch.tensor([cap])])
