"""Mean gradients over batches, accumulated until these or the time end; DeMo's local training is one for a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tplr.errors import StateError
from tplr.training.local import LocalWork, TrainStats
from tplr.training.loss import Precision, batch_loss
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


class WindowGradient:
    """The mean gradient over a window's batches; see ``LocalTraining``. Leaves nothing for the next window."""

    moves = False

    def __init__(self, precision: Precision) -> None:
        self._precision: Precision = precision

    def run(
        self,
        model: LlamaForCausalLM,
        batches: np.ndarray,
        *,
        step: int,
        stop: Callable[[], bool] = lambda: False,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> LocalWork:
        """See ``LocalTraining``; all steps are alike."""
        train_stats, tensors = TrainStats(), {}
        model.zero_grad(set_to_none=True)
        if accumulate_gradient(model, batches, train_stats, precision=self._precision, stop=stop, parallel=parallel):
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, f"{name} takes no part in the loss"
                tensors[name] = parallel.whole(parameter.grad)
        model.zero_grad(set_to_none=True)
        return LocalWork(tensors, train_stats)

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """No tensors, no values."""
        return {"tensors": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateError unless the state is the empty one."""
        if state != self.state_dict():
            raise StateError(f"window gradient: found {sorted(state)}; expected no state: it is another scheme's")


def accumulate_gradient(
    model: LlamaForCausalLM,
    batches: np.ndarray,
    train_stats: TrainStats,
    *,
    precision: Precision,
    stop: Callable[[], bool],
    parallel: ParallelContext = SINGLE_PROCESS,
) -> bool:
    """Put the mean gradient over ``batches`` into ``grad`` of the model's parameters, which must be empty before.

    A team takes as many batches at a time as it has ranks, one each; if a loss of them is not finite, all of them are
    left out. ``stop()`` is asked before each such round.

    Args:
        batches: (batches, B, T) token ids.
        tally: what was done is added to it.

    Returns:
        Whether any batch was done; if not, the gradients are empty.
    """
    done = 0
    for begin in range(0, len(batches), parallel.size):
        if parallel.any(stop()):
            train_stats.stopped = True
            break
        mates = batches[begin : begin + parallel.size]
        # In an incomplete last round the other ranks do a batch for nothing: they are needed in the collectives.
        has_own = parallel.rank < len(mates)
        loss = batch_loss(model, mates[parallel.rank if has_own else 0], precision)
        value = loss.item()
        if parallel.any(not math.isfinite(value)):
            train_stats.skipped += len(mates)
            continue
        # Sharded gradients are averaged over ranks: this makes them the sum.
        (loss * (parallel.size if has_own else 0)).backward()
        train_stats.losses += parallel.total(value if has_own else 0.0)
        train_stats.tokens += mates.size
        done += len(mates)
    for gradient in _gradients(model):
        gradient.div_(done)
    train_stats.batches += done
    return done > 0


def gradient_norm(model: torch.nn.Module, parallel: ParallelContext = SINGLE_PROCESS) -> float:
    """L2 norm of all gradients together."""
    norms = [torch.linalg.vector_norm(parallel.local(one), dtype=torch.float64) for one in _gradients(model)]
    return math.sqrt(parallel.total(sum(norm.item() ** 2 for norm in norms)))


def clip_gradient(model: torch.nn.Module, norm: float, largest: float) -> None:
    """Scale all gradients, whose L2 norm is ``norm``, to one of at most ``largest``."""
    if norm > largest:
        for gradient in _gradients(model):
            gradient.mul_(largest / norm)


def _gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
