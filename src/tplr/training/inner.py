"""SparseLoCo's local training: steps of AdamW from the agreed weights, and the difference that they make.

DiLoCo (arXiv 2311.08105) calls it the inner loop. AdamW's moments stay on the miner from window to window.
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
from tplr.training.local import Expect, LocalWork, Stop, TrainStats, Unfinished, never
from tplr.training.loss import Precision
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows, together
from tplr.training.saved import checked_copies
from tplr.training.schedule import learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_VERSION = 2
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.AdamW names them


class InnerLoop:
    """See ``LocalTraining``: its tensors are ``weights before - weights after``.

    AdamW's moments are reset, both live and after a restart, when they are more than ``stale_after_windows`` outer
    steps old.

    Args:
        parameters: of the model, float32; their shapes and their device are used.

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
        self._parameters = dict(parameters)
        self._moments: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in MOMENTS}
        self._steps_done = 0  # AdamW's own count, for the bias correction of its moments
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
        """See ``LocalTraining``. When the time ends, the last inner step is taken with the batches done by then."""
        part = unfinished or Unfinished(step)
        self._reset_if_stale(part.step)
        before = before or kept_weights(model, self._settings)
        train_stats, paused = part.train_stats, False
        try:
            _move(model, part.change, -1)
            part.change = {}
            if expect:
                expect(1)
            optimizer = self._optimizer(model)
            done = train_stats.batches
            while part.index < self._constants.inner_steps:
                size = self._constants.batches_per_inner_step
                share = batches[part.index * size : (part.index + 1) * size]
                if train_stats.stopped or not len(share):
                    break
                if paused := self._parallel.any(pause()):
                    break
                if self._gradient(model, share, train_stats, stop):
                    # By the position in the run, not by steps done: a window cut short does not delay the schedule.
                    position = part.step * self._constants.inner_steps + part.index
                    optimizer.param_groups[0]["lr"] = learning_rate(position, self._constants.inner_learning_rate)
                    optimizer.step()
                model.zero_grad(set_to_none=True)
                part.index += 1
            if train_stats.batches > done:
                self._save_moments(optimizer, model, part.step)
            if train_stats.batches:
                if expect:
                    expect(-1)
                part.change = _change(model, before)
        finally:
            _set_weights(model, before)
        return LocalWork({}, train_stats, part) if paused else LocalWork(part.change, train_stats)

    def _gradient(self, model: PreTrainedModel, share: np.ndarray, train_stats: TrainStats, stop: Stop) -> bool:
        """Accumulate and clip one inner step's gradient; False if there is none, or it is not finite."""
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

    def _optimizer(self, model: PreTrainedModel) -> torch.optim.AdamW:
        """AdamW with the kept moments, which it changes in place."""
        c = self._constants
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=0.0,  # set before each step
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_epsilon,
            weight_decay=c.weight_decay,
            fused=self._settings.fused_adamw,
            foreach=not self._settings.fused_adamw,
        )
        # The fused kernel reads the count on the device.
        steps_device = model.device if self._settings.fused_adamw else "cpu"
        for name, parameter in model.named_parameters() if self._steps_done else ():
            state = optimizer.state[parameter] = {"step": torch.tensor(float(self._steps_done), device=steps_device)}
            state |= {moment: self._moments[moment][name] for moment in MOMENTS}
        return optimizer

    def _save_moments(self, optimizer: torch.optim.AdamW, model: PreTrainedModel, step: int) -> None:
        states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        self._moments = {moment: {name: one[moment] for name, one in states.items()} for moment in MOMENTS}
        self._steps_done, self._step = int(next(iter(states.values()))["step"].item()), step

    def _reset_if_stale(self, step: int) -> None:
        if self._step is not None and step - self._step > self._stale_after:
            logger.warning(
                "inner optimizer reset: its moments are %d outer steps old, stale_after_windows is %d",
                step - self._step,
                self._stale_after,
            )
            self._reset()

    def _reset(self) -> None:
        self._moments, self._steps_done, self._step = {moment: {} for moment in MOMENTS}, 0, None

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """``version``, ``step`` (outer, or None), ``steps_done`` (inner), and ``tensors`` as ``exp_avg.NAME``."""
        tensors = {
            f"{moment}.{name}": tensor.to("cpu", copy=True) if copies else tensor
            for moment, by_name in self._moments.items()
            for name, tensor in by_name.items()
        }
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "steps_done": self._steps_done,
            "tensors": tensors,
        }

    @property
    def layout(self) -> dict[str, torch.Tensor]:
        """See ``LocalTraining``."""
        return {f"{moment}.{name}": one for moment in MOMENTS for name, one in self._parameters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``LocalTraining``."""
        with together(self._parallel):
            if state.keys() != {"version", "step", "steps_done", "tensors"} or state["version"] != STATE_VERSION:
                raise StateError(
                    f"inner loop: keys {sorted(state)}, version {state.get('version')}; expected {STATE_VERSION}"
                )
            found = checked_copies(state["tensors"], self.layout, "inner loop")
        self._moments = {
            moment: {name: found[f"{moment}.{name}"] for name in self._parameters if found} for moment in MOMENTS
        }
        self._steps_done, self._step = state["steps_done"], state["step"]


def kept_weights(model: torch.nn.Module, settings: DeviceSettings) -> dict[str, torch.Tensor]:
    """Copies of this rank's rows of all weights, by name, where ``settings`` keep them."""
    keep = host_copy if settings.offload_weights else torch.clone
    return {name: keep(local_rows(parameter.detach())[0]) for name, parameter in model.named_parameters()}


@torch.no_grad()
def _change(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights before minus those now, sharded as the parameters."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = torch.empty_like(parameter.detach())
        change, _ = local_rows(tensors[name])
        change.copy_(before[name], non_blocking=True).sub_(local_rows(parameter.detach())[0])
    return tensors


@torch.no_grad()
def _move(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], sign: int) -> None:
    """``weights += sign * tensors``, where there are some."""
    for name, parameter in model.named_parameters() if tensors else ():
        local_rows(parameter.detach())[0].add_(local_rows(tensors[name])[0], alpha=sign)


@torch.no_grad()
def _set_weights(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        local_rows(parameter.detach())[0].copy_(before[name], non_blocking=True)
