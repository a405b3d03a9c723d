"""What a miner does on its own in a window, whichever the scheme: from batches to the tensors that will be packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tplr.training.parallel import SINGLE_PROCESS, ParallelContext

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass
class TrainStats:
    """What went into a window's training so far.

    Attributes:
        losses: sum over the batches, in nats a token.
        skipped: batches left out because a loss or a gradient was not finite.
        stopped: the time ended before the batches did.
    """

    losses: float = 0.0
    batches: int = 0
    tokens: int = 0
    skipped: int = 0
    stopped: bool = False

    @property
    def loss(self) -> float:
        """Mean over the batches; NaN if no batch was done."""
        return self.losses / self.batches if self.batches else math.nan


@dataclass(frozen=True)
class LocalWork:
    """What came of a window's batches.

    Attributes:
        tensors: float32, by parameter name, each with its parameter's shape; what ``OuterScheme.pack`` takes. Empty if
            no batch was done.
    """

    tensors: dict[str, torch.Tensor]
    train_stats: TrainStats


class LocalTraining(Protocol):
    """Made once for a run; keeps what one window's training leaves for the next.

    Attributes:
        moves: while it runs, the model's weights or what it keeps are not those of before.
    """

    moves: bool

    def run(
        self,
        model: LlamaForCausalLM,
        batches: np.ndarray,
        *,
        step: int,
        stop: Callable[[], bool] = lambda: False,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> LocalWork:
        """Train on ``batches`` until they end or ``stop()`` says so; asked before each of them.

        The model's weights are those of before afterwards, and its ``grad`` fields are empty: only the outer step
        moves a model.

        Args:
            batches: (batches, B, T) token ids.
            step: outer steps that the model holds.

        Raises:
            TrainingError: another rank of the team failed.
        """
        ...

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """What must survive a restart: JSON values and ``tensors`` by name, on the CPU and the caller's own; without
        ``copies`` the live ones, for who writes them down before they change."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; raises ``StateError`` and changes nothing if it does not fit."""
        ...
