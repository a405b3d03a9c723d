"""Mean gradients over batches, accumulated until the batches or the time end; DeMo's local training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tplr.errors import StateError
from tplr.training.local import LocalWork, Stop, TrainStats, never
from tplr.training.loss import Precision, batch_loss
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


class WindowGradient:
    """See ``LocalTraining``: its tensors are the mean gradient of the window, and it keeps no state."""

    moves = False

    def __init__(self, precision: Precision, parallel: ParallelContext = SINGLE_PROCESS) -> None:
        self._parallel = parallel
        self._precision: Precision = precision

    def run(self, model: LlamaForCausalLM, batches: np.ndarray, *, step: int, stop: Stop = never) -> LocalWork:
        """See ``LocalTraining``; ``step`` is not used."""
        model.zero_grad(set_to_none=True)
        train_stats = accumulate_gradient(model, batches, self._precision, stop, self._parallel)
        tensors = {}
        for name, parameter in model.named_parameters() if train_stats.batches else ():
            assert parameter.grad is not None, f"{name} takes no part in the loss"
            tensors[name] = parameter.grad
        model.zero_grad(set_to_none=True)
        return LocalWork(tensors, train_stats)

    @property
    def layout(self) -> dict[str, torch.Tensor]:
        """No tensors."""
        return {}

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """The empty state."""
        return {"tensors": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateError unless the state is the empty one."""
        if {**state, "tensors": dict(state.get("tensors", {}))} != self.state_dict():
            raise StateError(
                f"window gradient: found {sorted(state)}; expected no state: the state is another scheme's"
            )


def accumulate_gradient(
    model: LlamaForCausalLM, batches: np.ndarray, precision: Precision, stop: Stop, parallel: ParallelContext
) -> TrainStats:
    """Accumulate the mean gradient over ``batches`` in the parameters' ``grad``, which must be empty before.

    A round is one batch for each rank. A round with a loss that is not finite is skipped. ``stop()`` is asked before
    each round.

    Args:
        batches: (batches, B, T) token ids.

    Returns:
        What was done; without any batch, the gradients are empty.
    """
    train_stats = TrainStats()
    for begin in range(0, len(batches), parallel.size):
        if parallel.any(stop()):
            train_stats.stopped = True
            break
        in_round = batches[begin : begin + parallel.size]
        # In an incomplete last round the idle ranks repeat a batch, which does not count: the collectives need them.
        has_batch = parallel.rank < len(in_round)
        loss = batch_loss(model, in_round[parallel.rank if has_batch else 0], precision)
        value = loss.item()
        if parallel.any(not math.isfinite(value)):
            train_stats.skipped += len(in_round)
            continue
        # FSDP averages gradients over ranks; the factor makes them a sum.
        (loss * (parallel.size if has_batch else 0)).backward()
        train_stats.losses += parallel.sum(value if has_batch else 0.0)
        train_stats.tokens += in_round.size
        train_stats.batches += len(in_round)
    for gradient in _gradients(model):
        gradient.div_(train_stats.batches)
    return train_stats


def gradient_norm(model: torch.nn.Module, parallel: ParallelContext) -> float:
    """L2 norm over all gradients."""
    norms = [torch.linalg.vector_norm(local_rows(one)[0], dtype=torch.float64) for one in _gradients(model)]
    return math.sqrt(parallel.sum(sum(norm.item() ** 2 for norm in norms)))


def clip_gradient(model: torch.nn.Module, norm: float, largest: float) -> None:
    """Scale gradients of L2 norm ``norm`` by ``min(1, largest / norm)``."""
    if norm > largest:
        for gradient in _gradients(model):
            gradient.mul_(largest / norm)


def _gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
