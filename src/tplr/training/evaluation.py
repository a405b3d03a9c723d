"""Measures the change of loss by one miner's update, on the same sequences before and after.

The baseline on the held-out pages is measured once for all miners. A calibration (an update that is measured on these
pages alone) costs one forward pass over a quarter of them. An update that is measured on its assigned pages, too, costs
one over all held-out pages and two over the assigned ones (before, after). In between the model takes a trial step in
place; then the previous weights are copied back. This needs the memory of a copy of the weights, on each rank of its
shards.

Differences on the same sequences vary far less than losses. The standard error of their mean shows how many sequences
are needed to distinguish a sign from chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tplr.compress.payload import Update
from tplr.schemas import Evaluation, LossChange
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.local import Stop, never
from tplr.training.loss import Precision, token_losses
from tplr.training.outer.base import OuterScheme
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows
from tplr.training.rank_batches import all_losses, check_finite, own_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN = 1e9
# A calibration reads one in so many of the held-out batches. All of them would cost 6 % of a validator's window.
CALIBRATION_PART = 4
# The gradient after half of the step reads one in so many: it is another pass, and only compared with the first. All of
# them would cost 6 to 7 % of a validator's window.
MIDDLE_PART = 4


@dataclass(frozen=True)
class Baseline:
    """Batches (batches, B, T) of token ids, and the model's loss on each sequence, float64 [batches * B]."""

    batches: np.ndarray
    losses: np.ndarray

    @property
    def loss(self) -> float:
        """Mean loss, in nats per token."""
        return float(self.losses.mean())

    def for_middle(self) -> np.ndarray:
        """Return the batches of the gradient after half of the step: one in ``MIDDLE_PART``, rounded up."""
        return self.batches[: math.ceil(len(self.batches) / MIDDLE_PART)]

    def for_calibration(self) -> Baseline:
        """Return the part that a calibration reads: the first batches, one in ``CALIBRATION_PART``, rounded up."""
        count = math.ceil(len(self.batches) / CALIBRATION_PART)
        return Baseline(self.batches[:count], self.losses[: count * self.batches.shape[1]])


@torch.no_grad()
def sequence_losses(
    model: PreTrainedModel,
    batches: np.ndarray,
    precision: Precision,
    parallel: ParallelContext = SINGLE_PROCESS,
    settings: DeviceSettings = DEFAULTS,
    *,
    stop: Stop = never,
) -> np.ndarray:
    """Compute the mean loss of each sequence in nats per token, float64 [batches * B]; one forward pass for each batch.

    Ranks take batches alternately; every rank gets all losses, in the order of the batches.

    Args:
        batches: (batches, B, T) token ids.
        stop: as in ``own_batches``.

    Raises:
        TrainingError: ended by ``stop``.
        ValueError: no batches.
    """
    found = [
        token_losses(model, batch, precision, settings).double().mean(dim=1)
        for batch, _ in own_batches(batches, parallel, stop)
    ]
    return all_losses(found, batches, parallel)


def baseline(
    model: PreTrainedModel,
    batches: np.ndarray,
    precision: Precision,
    parallel: ParallelContext = SINGLE_PROCESS,
    settings: DeviceSettings = DEFAULTS,
    *,
    stop: Stop = never,
) -> Baseline:
    """Measure the model's losses without any update. Raises TrainingError if a loss is not finite, or by ``stop``."""
    losses = sequence_losses(model, batches, precision, parallel, settings, stop=stop)
    check_finite(losses)
    return Baseline(batches, losses)


def evaluate(
    model: PreTrainedModel,
    outer: OuterScheme,
    update: Update,
    *,
    step: int,
    assigned: np.ndarray | None,
    held_out: Baseline,
    precision: Precision,
    parallel: ParallelContext = SINGLE_PROCESS,
    settings: DeviceSettings = DEFAULTS,
    stop: Stop = never,
) -> Evaluation:
    """Measure an update on the held-out pages and its assigned ones. Afterwards the model's bytes are unchanged.

    Args:
        assigned: (batches, B, T) token ids of the miner's assigned pages; None: calibrate, on a part of the held-out
            pages alone.
        held_out: baseline on pages that nobody knew during the window.
        stop: as in ``own_batches``.

    Raises:
        TrainingError, ValueError: as ``baseline`` and ``sequence_losses``.
    """
    if assigned is None:
        before = [held_out.for_calibration()]
    else:
        before = [held_out, baseline(model, assigned, precision, parallel, settings, stop=stop)]
    with trial_step_applied(model, outer, update, step=step):
        after = [sequence_losses(model, one.batches, precision, parallel, settings, stop=stop) for one in before]
    changes = [_change(one.losses, losses) for one, losses in zip(before, after, strict=True)]
    return Evaluation(held_out=changes[0], assigned=changes[1] if assigned is not None else None)


@contextmanager
def trial_step_applied(model: PreTrainedModel, outer: OuterScheme, update: Update, *, step: int) -> Iterator[None]:
    """Take a trial step along ``update`` for the duration of the block; restore the model's exact bytes afterwards."""
    with _restored(model):
        outer.trial_step(update, step=step)
        yield


@contextmanager
def half_step_taken(
    model: PreTrainedModel, outer: OuterScheme, updates: Sequence[Update], *, step: int
) -> Iterator[None]:
    """Take half of the step along ``updates`` for the duration of the block; restore the exact bytes afterwards.

    Raises:
        ValueError: as ``OuterScheme.apply``.
    """
    with _restored(model):
        outer.part_of_step(updates, step=step, share=0.5)
        yield


@contextmanager
def _restored(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model's exact bytes after the block."""
    parameters = list(model.parameters())
    before = [local_rows(one.detach())[0].clone() for one in parameters]
    try:
        yield
    finally:
        for parameter, values in zip(parameters, before, strict=True):
            local_rows(parameter.detach())[0].copy_(values)


def _change(before: np.ndarray, after: np.ndarray) -> LossChange:
    return LossChange(
        before=float(before.mean()),
        after=_finite_mean(after),
        error=_standard_error(before - after),
        sequences=len(before),
    )


def _finite_mean(losses: np.ndarray) -> float | None:
    mean = float(losses.mean())
    return mean if math.isfinite(mean) else None


def _standard_error(differences: np.ndarray) -> float:
    """Return the standard error of the mean; ``UNKNOWN`` with only one difference, or one that is not finite."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return UNKNOWN
    return float(differences.std(ddof=1)) / math.sqrt(len(differences))
