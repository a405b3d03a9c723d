"""SparseLoCo's local training: optimizer steps from the agreed weights, and the resulting change of the weights.

DiLoCo (arXiv 2311.08105) calls it the inner loop. The miner keeps the optimizer's moments from window to window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.training.device import DEFAULTS, DeviceSettings, host_copy
from tplr.training.gradient import accumulate_gradient, clip_gradient, gradient_norm
from tplr.training.inner_optimizers import InnerOptimizer
from tplr.training.local import Expect, LocalWork, Stop, TrainStats, Unfinished, never
from tplr.training.loss import Precision
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows, together
from tplr.training.saved import checked_copies
from tplr.training.schedule import learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_VERSION = 2


class InnerLoop:
    """See ``LocalTraining``: its tensors are ``weights before - weights after``.

    The optimizer's moments are reset, both live and after a restart, when they are more than ``stale_after_windows``
    outer steps old.

    Args:
        parameters: the model's, float32; only their shapes and their device are used.

    Raises:
        ValueError: hparams choose another scheme.
    """

    moves = True

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        hparams: HParams,
        settings: DeviceSettings = DEFAULTS,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> None:
        if hparams.sparseloco is None:
            raise ValueError(f"hparams choose the scheme {hparams.outer!r}, this is 'sparseloco'")
        self._parallel = parallel
        self._constants = hparams.sparseloco
        self._precision: Precision = hparams.precision
        self._settings = settings
        self._stale_after = hparams.stale_after_windows
        self._optimizer = InnerOptimizer(parameters, hparams.sparseloco, hparams.precision, settings, parallel)
        self._step: int | None = None  # outer step of the last training

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
        """See ``LocalTraining``. When the time ends, the last inner step uses the batches that are done."""
        part = unfinished or Unfinished(step)
        self._reset_if_stale(part.step)
        before = before or kept_weights(model, self._settings)
        train_stats, paused = part.train_stats, False
        try:
            _move(model, part.change, -1)
            part.change = {}
            if expect:
                expect(1)
            self._optimizer.begin(model)
            while part.index < self._constants.inner_steps:
                size = self._constants.batches_per_inner_step
                share = batches[part.index * size : (part.index + 1) * size]
                if train_stats.stopped or not len(share):
                    break
                if paused := self._parallel.any(pause()):
                    break
                if self._gradient(model, share, train_stats, stop):
                    # Position in the run, not steps done: a shortened window does not delay the schedule.
                    position = part.step * self._constants.inner_steps + part.index
                    self._optimizer.step(learning_rate(position, self._constants.inner_learning_rate))
                model.zero_grad(set_to_none=True)
                part.index += 1
            if train_stats.batches:
                self._step = part.step
                if expect:
                    expect(-1)
                part.change = _change(model, before)
        finally:
            _set_weights(model, before)
        return LocalWork({}, train_stats, part) if paused else LocalWork(part.change, train_stats)

    def _gradient(self, model: PreTrainedModel, share: np.ndarray, train_stats: TrainStats, stop: Stop) -> bool:
        """Accumulate and clip one inner step's gradient; return False if there is none, or it is not finite."""
        stats = accumulate_gradient(
            model, share, stop, precision=self._precision, parallel=self._parallel, settings=self._settings
        )
        norm = gradient_norm(model, self._parallel) if stats.batches else 0.0
        train_stats.stopped = stats.stopped
        train_stats.skipped += stats.skipped
        if not math.isfinite(norm):
            train_stats.skipped += stats.batches
            return False
        train_stats.losses += stats.losses
        train_stats.batches += stats.batches
        train_stats.tokens += stats.tokens
        clip_gradient(model, norm, self._constants.gradient_clip_norm)
        return stats.batches > 0

    def _reset_if_stale(self, step: int) -> None:
        if self._step is not None and step - self._step > self._stale_after:
            logger.warning(
                "inner optimizer reset: its moments are %d outer steps old, stale_after_windows is %d",
                step - self._step,
                self._stale_after,
            )
            self._optimizer.reset()
            self._step = None

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return ``version``, ``step`` (outer, or None), ``steps_done`` (inner), ``tensors`` as ``exp_avg.NAME``."""
        tensors = self._optimizer.moments
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "steps_done": self._optimizer.steps_done,
            "tensors": {name: one.to("cpu", copy=True) for name, one in tensors.items()} if copies else dict(tensors),
        }

    @property
    def layout(self) -> dict[str, torch.Tensor]:
        """See ``LocalTraining``."""
        return self._optimizer.layout

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``LocalTraining``."""
        with together(self._parallel):
            if state.keys() != {"version", "step", "steps_done", "tensors"} or state["version"] != STATE_VERSION:
                raise StateError(
                    f"inner loop: keys {sorted(state)}, version {state.get('version')}; expected {STATE_VERSION}"
                )
            found = checked_copies(state["tensors"], self.layout, "inner loop")
        self._optimizer.moments = found
        self._optimizer.steps_done, self._step = state["steps_done"], state["step"]


def kept_weights(model: torch.nn.Module, settings: DeviceSettings) -> dict[str, torch.Tensor]:
    """Copy this rank's rows of all weights to where ``settings`` keep them; return the copies by name."""
    keep = host_copy if settings.offload_weights else torch.clone
    return {name: keep(local_rows(parameter.detach())[0]) for name, parameter in model.named_parameters()}


@torch.no_grad()
def _change(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the previous weights minus the current ones, sharded like the parameters."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = torch.empty_like(parameter.detach())
        change, _ = local_rows(tensors[name])
        change.copy_(before[name], non_blocking=True).sub_(local_rows(parameter.detach())[0])
    return tensors


@torch.no_grad()
def _move(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], sign: int) -> None:
    """Compute ``weights += sign * tensors`` for the weights that have a tensor."""
    for name, parameter in model.named_parameters() if tensors else ():
        local_rows(parameter.detach())[0].add_(local_rows(tensors[name])[0], alpha=sign)


@torch.no_grad()
def _set_weights(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        local_rows(parameter.detach())[0].copy_(before[name], non_blocking=True)
