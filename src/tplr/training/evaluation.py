"""Measures what one miner's update does to the loss, on the same sequences before and after.

An update costs two forward passes over its assigned pages (before, after) and one over the held-out pages, whose
baseline is measured once for all miners. The parameters never change: each module computes with trial values in their
place, and the embedding and the output layer do so one row block at a time. Nothing has to be undone, and the extra
memory is less than the largest tensor's.

Differences of the same sequences vary far less than losses. The standard error of their mean says how many sequences it
takes to tell a sign from chance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from tplr.compress.payload import Update
from tplr.errors import TrainingError
from tplr.schemas import Evaluation
from tplr.training.loss import Precision, token_losses
from tplr.training.outer.base import OuterScheme, RowBlocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN = 1e9
# From a parameter to its trial values.
TrialStep = Callable[[torch.Tensor], RowBlocks]


@dataclass(frozen=True)
class Baseline:
    """Batches (batches, B, T) of token ids, and the model's loss on each sequence, float64 [batches * B]."""

    batches: np.ndarray
    losses: np.ndarray


@torch.inference_mode()
def sequence_losses(model: PreTrainedModel, batches: np.ndarray, precision: Precision) -> np.ndarray:
    """Mean loss of each sequence in nats per token, float64 [batches * B]; one forward pass for each batch.

    Args:
        batches: (batches, B, T) token ids.

    Raises:
        ValueError: no batches.
    """
    if not len(batches):
        raise ValueError("sequence_losses: no batches; the pages hold less text than one batch")
    found = [token_losses(model, batch, precision).double().mean(dim=1).cpu() for batch in batches]
    return torch.cat(found).numpy()


def baseline(model: PreTrainedModel, batches: np.ndarray, precision: Precision) -> Baseline:
    """The model's losses without any update. Raises TrainingError if one is not finite: nothing can be compared."""
    losses = sequence_losses(model, batches, precision)
    if not np.isfinite(losses).all():
        raise TrainingError("the model's own loss is not finite: nobody can be measured against it")
    return Baseline(batches, losses)


def evaluate(
    model: PreTrainedModel,
    outer: OuterScheme,
    update: Update,
    *,
    step: int,
    assigned: np.ndarray,
    held_out: Baseline,
    precision: Precision,
) -> Evaluation:
    """Measure an update on its assigned and on the held-out pages. The model's bytes do not change.

    Args:
        assigned: (batches, B, T) token ids of the pages that the miner was given.
        held_out: of pages that nobody knew while the window lasted.

    Raises:
        TrainingError, ValueError: as ``baseline`` and ``sequence_losses``.
    """
    before = baseline(model, assigned, precision).losses
    with trial_step_applied(model, outer, update, step=step):
        after = sequence_losses(model, assigned, precision)
        held_out_after = sequence_losses(model, held_out.batches, precision)
    return Evaluation(
        own_before=float(before.mean()),
        own_after=_finite_mean(after),
        own_error=_standard_error(before - after),
        own_sequences=len(before),
        random_before=float(held_out.losses.mean()),
        random_after=_finite_mean(held_out_after),
        random_error=_standard_error(held_out.losses - held_out_after),
        random_sequences=len(held_out.losses),
    )


@contextmanager
def trial_step_applied(model: PreTrainedModel, outer: OuterScheme, update: Update, *, step: int) -> Iterator[None]:
    """In this context ``model`` computes as if a trial step along ``update`` had been taken; its parameters stay.

    Every forward pass decodes the update again, so pass large batches.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    modules = [module for module in model.modules() if [*module.parameters(recurse=False)]]
    # The vocabulary's matrices are the largest tensors: they never exist whole with trial values.
    by_row_block = {model.get_input_embeddings(): _embed, model.get_output_embeddings(): _project}
    for module in modules:
        module.forward = functools.partial(
            by_row_block.get(module, _forward), module, lambda one: outer.trial_step(names[one], update, step=step)
        )
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # uncovers the class's own


def _embed(module: torch.nn.Embedding, trial_step: TrialStep, ids: torch.Tensor) -> torch.Tensor:
    found = F.embedding(ids, module.weight)
    for rows, weight in trial_step(module.weight):
        here = (ids >= rows.start) & (ids < rows.stop)
        found[here] = weight[ids[here] - rows.start]
    # Gemma's table scales what is looked up in it.
    return found * getattr(module, "embed_scale", 1)


def _project(module: torch.nn.Linear, trial_step: TrialStep, inputs: torch.Tensor) -> torch.Tensor:
    found = None
    for rows, weight in trial_step(module.weight):
        part = F.linear(inputs, weight)
        if found is None:
            found = part.new_empty(*part.shape[:-1], module.out_features)
        found[..., rows] = part
    assert found is not None
    return found


def _forward(module: torch.nn.Module, trial_step: TrialStep, *inputs: torch.Tensor) -> torch.Tensor:
    """The forward pass of the module's class, with trial values in place of its parameters."""
    parameters = dict(module.named_parameters(recurse=False))
    try:
        for key, one in parameters.items():
            trial = torch.empty_like(one)
            for rows, values in trial_step(one):
                trial.view(-1, values.shape[1])[rows] = values
            module._parameters[key] = torch.nn.Parameter(trial, requires_grad=False)
        return type(module).forward(module, *inputs)
    finally:
        module._parameters.update(parameters)


def _finite_mean(losses: np.ndarray) -> float | None:
    mean = float(losses.mean())
    return mean if math.isfinite(mean) else None


def _standard_error(differences: np.ndarray) -> float:
    """Standard error of the mean; ``UNKNOWN`` if there is only one difference, or one is not finite."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return UNKNOWN
    return float(differences.std(ddof=1)) / math.sqrt(len(differences))
