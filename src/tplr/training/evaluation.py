"""What one miner's update does to the loss: measured sequence by sequence, on the same sequences before and after.

Forward passes for each update: two over its own pages (before, after) and one over the random pages; their baseline
is measured once for all. The parameters themselves are never changed: modules compute with moved ones in their place,
one module at a time, the vocabulary's slab by slab. So nothing is left to undo, and memory is less than one tensor's.

Differences of the same sequences before and after vary far less than the losses themselves: the error of their mean
says how many sequences it takes to tell a sign from chance.
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
    from transformers import LlamaForCausalLM

UNKNOWN = 1e9
Moved = Callable[[torch.Tensor], RowBlocks]


@dataclass(frozen=True)
class Baseline:
    """Batches [batches, B, T], and the model's loss on each of their sequences, float64 [batches * B]."""

    batches: np.ndarray
    losses: np.ndarray


@torch.inference_mode()
def sequence_losses(model: LlamaForCausalLM, batches: np.ndarray, precision: Precision) -> np.ndarray:
    """Mean loss of each sequence in nats a token; float64 [batches * B], a forward pass for each batch.

    Args:
        batches: (batches, B, T) token ids.

    Raises:
        ValueError: no batches, so there is nothing to measure.
    """
    if not len(batches):
        raise ValueError("sequence_losses: no batches; the pages hold less text than one batch")
    found = [token_losses(model, batch, precision).double().mean(dim=1).cpu() for batch in batches]
    return torch.cat(found).numpy()


def baseline(model: LlamaForCausalLM, batches: np.ndarray, precision: Precision) -> Baseline:
    """The model's losses as it is. Raises TrainingError if one is not finite: nothing can be compared with that."""
    losses = sequence_losses(model, batches, precision)
    if not np.isfinite(losses).all():
        raise TrainingError("the model's own loss is not finite: nobody can be measured against it")
    return Baseline(batches, losses)


def evaluate(
    model: LlamaForCausalLM,
    outer: OuterScheme,
    update: Update,
    *,
    step: int,
    own: np.ndarray,
    random: Baseline,
    precision: Precision,
) -> Evaluation:
    """Measure ``update``: on its own pages' batches ``own``, and on the random ones of ``random``.

    The model's bytes are the same before and after.
    """
    before = baseline(model, own, precision).losses
    with trial_step_applied(model, outer, update, step=step):
        after = sequence_losses(model, own, precision)
        random_after = sequence_losses(model, random.batches, precision)
    return Evaluation(
        own_before=float(before.mean()),
        own_after=_finite_mean(after),
        own_error=_standard_error(before - after),
        own_sequences=len(before),
        random_before=float(random.losses.mean()),
        random_after=_finite_mean(random_after),
        random_error=_standard_error(random.losses - random_after),
        random_sequences=len(random.losses),
    )


@contextmanager
def trial_step_applied(model: LlamaForCausalLM, outer: OuterScheme, update: Update, *, step: int) -> Iterator[None]:
    """Within, ``model`` computes as if ``update`` alone had moved it a part of a step; its parameters stay as they are.

    Every forward pass decodes the update anew, so pass large batches.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    modules = [module for module in model.modules() if [*module.parameters(recurse=False)]]
    # The vocabulary's matrices are much the largest: they are never moved whole.
    special = {model.get_input_embeddings(): _embed, model.get_output_embeddings(): _project}
    for module in modules:
        module.forward = functools.partial(
            special.get(module, _whole), module, lambda one: outer.trial_step(names[one], update, step=step)
        )
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class has its own


def _embed(module: torch.nn.Embedding, moved: Moved, ids: torch.Tensor) -> torch.Tensor:
    found = F.embedding(ids, module.weight)
    for rows, band in moved(module.weight):
        here = (ids >= rows.start) & (ids < rows.stop)
        found[here] = band[ids[here] - rows.start]
    return found


def _project(module: torch.nn.Linear, moved: Moved, inputs: torch.Tensor) -> torch.Tensor:
    found = None
    for rows, band in moved(module.weight):
        part = F.linear(inputs, band)
        if found is None:
            found = part.new_empty(*part.shape[:-1], module.out_features)
        found[..., rows] = part
    assert found is not None
    return found


def _whole(module: torch.nn.Module, moved: Moved, inputs: torch.Tensor) -> torch.Tensor:
    own = dict(module.named_parameters(recurse=False))
    try:
        for key, one in own.items():
            there = torch.empty_like(one)
            for rows, band in moved(one):
                there.view(-1, band.shape[1])[rows] = band
            module._parameters[key] = torch.nn.Parameter(there, requires_grad=False)
        return type(module).forward(module, inputs)
    finally:
        module._parameters.update(own)


def _finite_mean(losses: np.ndarray) -> float | None:
    mean = float(losses.mean())
    return mean if math.isfinite(mean) else None


def _standard_error(differences: np.ndarray) -> float:
    """Of the mean of ``differences``; so large that nothing follows from it if there is one, or one is not finite."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return UNKNOWN
    return float(differences.std(ddof=1)) / math.sqrt(len(differences))
