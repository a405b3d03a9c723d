"""SparseLoCo's local training: some steps of AdamW from the common weights, and how far they led.

DiLoCo (arXiv 2311.08105) calls it the inner loop. What travels is the difference of the weights before and after;
AdamW's moments stay here, from window to window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.training.gradient import accumulate_gradient, clip_gradient, gradient_norm
from tplr.training.local import LocalWork, TrainStats
from tplr.training.loss import Precision
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext
from tplr.training.saved import checked_copies
from tplr.training.schedule import learning_rate

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

STATE_VERSION = 2
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.AdamW names them


class InnerLoop:
    """See ``LocalTraining``. Its tensors are ``weights before - weights after``, an inner step's direction.

    AdamW's moments are dropped, live and after a restart alike, when the model has moved more than
    ``stale_after_windows`` times since.

    Args:
        parameters: of the model, float32; for their shapes and their device.

    Raises:
        ValueError: the run's scheme is another one.
    """

    moves = True

    def __init__(self, parameters: Mapping[str, torch.Tensor], hparams: HParams) -> None:
        if hparams.sparseloco is None:
            raise ValueError(f"hparams choose the scheme {hparams.outer!r}, this is 'sparseloco'")
        self._constants = hparams.sparseloco
        self._precision: Precision = hparams.precision
        self._stale_after = hparams.stale_after_windows
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        self._moments: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in MOMENTS}
        self._steps_done = 0  # AdamW's own count, by which it corrects its moments' bias
        self._step: int | None = None  # the outer one, when it was last trained

    def run(
        self,
        model: LlamaForCausalLM,
        batches: np.ndarray,
        *,
        step: int,
        stop: Callable[[], bool] = lambda: False,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> LocalWork:
        """See ``LocalTraining``. An inner step that the end of time cuts short is taken with the batches it had."""
        self._drop_if_stale(step)
        train_stats, tensors = TrainStats(), {}
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        try:
            optimizer = self._optimizer(model, parallel)
            for index in range(self._constants.inner_steps):
                size = self._constants.batches_per_inner_step
                share = batches[index * size : (index + 1) * size]
                if train_stats.stopped or not len(share):
                    break
                if self._gradient(model, share, train_stats, stop, parallel):
                    # By the place in the run, not by steps done: a window that was cut short does not delay the rest.
                    at = step * self._constants.inner_steps + index
                    optimizer.param_groups[0]["lr"] = learning_rate(at, self._constants.inner_learning_rate)
                    optimizer.step()
                model.zero_grad(set_to_none=True)
            if train_stats.batches:
                self._keep(optimizer, model, step, parallel)
                for name, parameter in model.named_parameters():
                    tensors[name] = parallel.whole(before[name] - parameter.detach())
        finally:
            if parallel.size == 1:  # shards are filled anew for each window
                _restore(model, before)
        return LocalWork(tensors, train_stats)

    def _gradient(
        self,
        model: LlamaForCausalLM,
        share: np.ndarray,
        train_stats: TrainStats,
        stop: Callable[[], bool],
        parallel: ParallelContext,
    ) -> bool:
        """One inner step's clipped gradient; False if there is none, or none that is finite."""
        mine = TrainStats()
        found = accumulate_gradient(model, share, mine, precision=self._precision, stop=stop, parallel=parallel)
        norm = gradient_norm(model, parallel) if found else 0.0
        train_stats.stopped = mine.stopped
        train_stats.skipped += mine.skipped
        if not math.isfinite(norm):
            train_stats.skipped += mine.batches
            return False
        train_stats.losses += mine.losses
        train_stats.batches += mine.batches
        train_stats.tokens += mine.tokens
        clip_gradient(model, norm, self._constants.gradient_clip_norm)
        return found

    def _optimizer(self, model: LlamaForCausalLM, parallel: ParallelContext) -> torch.optim.AdamW:
        """AdamW with the moments that are kept; rank 0's, as the others keep none between windows."""
        c = self._constants
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=0.0,  # set before each step
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_epsilon,
            weight_decay=c.weight_decay,
        )
        done = parallel.total(self._steps_done if parallel.rank == 0 else 0)
        for name, parameter in model.named_parameters() if done else ():
            parts = {moment: parallel.part(self._moments[moment].get(name), parameter.detach()) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(done)), **parts}
        return optimizer

    def _keep(
        self, optimizer: torch.optim.AdamW, model: LlamaForCausalLM, step: int, parallel: ParallelContext
    ) -> None:
        """All moments or, if another rank fails meanwhile, none: there is no room for the old and the new ones."""
        self._drop()
        kept: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in MOMENTS}
        done = 0
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            done = int(state["step"].item())
            for moment in MOMENTS:
                kept[moment][name] = parallel.whole(state[moment])
        self._moments, self._steps_done, self._step = kept, done, step

    def _drop_if_stale(self, step: int) -> None:
        if self._step is not None and step - self._step > self._stale_after:
            logger.warning(
                "the inner optimizer starts anew: its moments are %d outer steps old, stale_after_windows is %d",
                step - self._step,
                self._stale_after,
            )
            self._drop()

    def _drop(self) -> None:
        self._moments, self._steps_done, self._step = {moment: {} for moment in MOMENTS}, 0, None

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """``version``, ``step`` (the outer one, or None), ``steps_done`` and ``tensors``, as ``exp_avg.NAME``."""
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``LocalTraining``."""
        if state.keys() != {"version", "step", "steps_done", "tensors"} or state["version"] != STATE_VERSION:
            raise StateError(
                f"inner loop: keys {sorted(state)}, version {state.get('version')}; expected {STATE_VERSION}"
            )
        expected = {f"{moment}.{name}": one for moment in MOMENTS for name, one in self._parameters.items()}
        found = checked_copies(state["tensors"], expected, "inner loop")
        self._moments = {
            moment: {name: found[f"{moment}.{name}"] for name in self._parameters if found} for moment in MOMENTS
        }
        self._steps_done, self._step = state["steps_done"], state["step"]


@torch.no_grad()
def _restore(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        parameter.copy_(before[name])
