"""Accumulates the mean gradient over batches until the batches or the time end; DeMo's local training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tplr.errors import StateError
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.inputs import device_batches
from tplr.training.local import Expect, LocalWork, Stop, TrainStats, Unfinished, never
from tplr.training.loss import Precision, batch_loss
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WindowGradient:
    """See ``LocalTraining``: its tensors are the mean gradient of the window, and it keeps no state."""

    moves = False

    def __init__(
        self,
        precision: Precision,
        settings: DeviceSettings = DEFAULTS,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> None:
        self._parallel = parallel
        self._precision: Precision = precision
        self._settings = settings

    def run(
        self,
        model: PreTrainedModel,
        batches: np.ndarray,
        *,
        step: int,
        stop: Stop = never,
        pause: Stop = never,
        expect: Expect | None = None,
        before: Mapping[str, torch.Tensor] | None = None,
        unfinished: Unfinished | None = None,
    ) -> LocalWork:
        """See ``LocalTraining``; the weights do not change, so only ``batches`` and ``stop`` are used."""
        model.zero_grad(set_to_none=True)
        train_stats = accumulate_gradient(
            model, batches, stop, precision=self._precision, parallel=self._parallel, settings=self._settings
        )
        return LocalWork(take_gradients(model) if train_stats.batches else {}, train_stats)

    @property
    def layout(self) -> dict[str, torch.Tensor]:
        """Empty: the state has no tensors."""
        return {}

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the empty state."""
        return {"tensors": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the state is empty. Raises StateError."""
        if {**state, "tensors": dict(state.get("tensors", {}))} != self.state_dict():
            raise StateError(
                f"window gradient: found {sorted(state)}; expected no state: the state is another scheme's"
            )


def take_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter by name; the model has none afterwards."""
    tensors = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} takes no part in the loss"
        tensors[name] = parameter.grad
    model.zero_grad(set_to_none=True)
    return tensors


def accumulate_gradient(
    model: PreTrainedModel,
    batches: np.ndarray,
    stop: Stop,
    *,
    precision: Precision,
    parallel: ParallelContext,
    settings: DeviceSettings = DEFAULTS,
) -> TrainStats:
    """Accumulate the mean gradient over ``batches`` in the parameters' ``grad``, which must be empty before.

    A round is one batch for each rank. ``stop()`` is called before each round. The host waits for the device once,
    after the last round, for all losses together. A round with a loss that is not finite is skipped: its gradient is
    already in the sum, so the other rounds are computed again, while ``stop()`` allows.

    Args:
        batches: (batches, B, T) token ids.

    Returns:
        The statistics; if no batch was done, the gradients are empty.
    """
    train_stats = TrainStats()
    rounds = [batches[begin : begin + parallel.size] for begin in range(0, len(batches), parallel.size)]
    while rounds:
        own, stopped = _run_rounds(model, rounds, stop, precision=precision, parallel=parallel, settings=settings)
        train_stats.stopped |= stopped
        losses = [parallel.sum(loss) for loss in own]
        finite = [one for one, loss in zip(rounds, losses, strict=False) if math.isfinite(loss)]
        done = sum(len(one) for one in rounds[: len(losses)])
        rounds, complete = finite, len(finite) == len(losses)
        if complete:
            train_stats.losses = sum(losses)
            break
        train_stats.skipped += done - sum(len(one) for one in finite)
        model.zero_grad(set_to_none=True)
    train_stats.batches = sum(len(one) for one in rounds)
    train_stats.tokens = sum(one.size for one in rounds)
    for gradient in _gradients(model):
        gradient.div_(train_stats.batches)
    return train_stats


def _run_rounds(
    model: PreTrainedModel,
    rounds: Sequence[np.ndarray],
    stop: Stop,
    *,
    precision: Precision,
    parallel: ParallelContext,
    settings: DeviceSettings,
) -> tuple[list[float], bool]:
    """Add the gradients of rounds until they or the time end.

    Returns:
        This rank's loss of each round, and whether the time ended.
    """
    # In an incomplete last round idle ranks repeat a batch, which does not count: collectives need every rank.
    has_batch = [parallel.rank < len(one) for one in rounds]
    own = np.stack([one[parallel.rank if busy else 0] for one, busy in zip(rounds, has_batch, strict=True)])
    losses: list[torch.Tensor] = []
    stopped = False
    ids = device_batches(own, model.device, ahead=settings.copy_ahead)
    for batch, busy in zip(ids, has_batch, strict=True):
        if stopped := parallel.any(stop()):
            break
        loss = batch_loss(model, batch, precision, settings)
        # FSDP averages gradients over ranks; the factor makes them a sum.
        (loss * (parallel.size if busy else 0)).backward()
        losses.append(loss.detach() if busy else torch.zeros_like(loss))
    return torch.stack(losses).tolist() if losses else [], stopped


def gradient_norm(model: torch.nn.Module, parallel: ParallelContext) -> float:
    """Return the L2 norm over all gradients."""
    norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in _gradients(model)]
    return math.sqrt(parallel.sum(torch.stack(norms).square().sum().item()))


def clip_gradient(model: torch.nn.Module, norm: float, largest: float) -> None:
    """Scale gradients of L2 norm ``norm`` by ``min(1, largest / norm)``."""
    if norm > largest:
        for gradient in _gradients(model):
            gradient.mul_(largest / norm)


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return this rank's part of each gradient."""
    return [local_rows(parameter.grad)[0] for parameter in model.parameters() if parameter.grad is not None]
