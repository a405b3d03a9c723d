"""Local training: from a window's batches to the tensors that the miner packs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Stop = Callable[[], bool]


def never() -> bool:
    """The default of ``stop``: train on all batches."""
    return False


@dataclass
class TrainStats:
    """Statistics of a window's training.

    Attributes:
        losses: sum of the batches' mean losses, in nats per token.
        batches: number of batches trained on.
        tokens: number of tokens in them.
        skipped: number of batches left out because a loss or a gradient was not finite.
        stopped: the time ended before the batches.
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
    """Result of a window's training.

    Attributes:
        tensors: float32, by parameter name, in the parameter's shape and sharded as it is, for ``OuterScheme.pack``;
            empty if no batch was done.
    """

    tensors: dict[str, torch.Tensor]
    train_stats: TrainStats


class LocalTraining(Protocol):
    """Trains window by window; one object for a run, which keeps state between windows, on each rank its shards.

    Attributes:
        layout: tensors of the state by name, each as the parameter that has its shape and shards.
        moves: while ``run`` runs, the model's weights or the kept state differ from those before it.
    """

    moves: bool

    @property
    def layout(self) -> Mapping[str, torch.Tensor]: ...

    def run(self, model: PreTrainedModel, batches: np.ndarray, *, step: int, stop: Stop = never) -> LocalWork:
        """Train on ``batches`` until they end or ``stop()``, asked before each batch, returns True.

        Afterwards the model's weights are as before and its ``grad`` fields empty: only the outer step moves a model.

        Args:
            batches: (batches, B, T) token ids.
            step: number of outer steps applied to the model.
        """
        ...

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """What must survive a restart: JSON values, and ``tensors`` by name.

        Args:
            copies: tensors are the caller's own copies on the CPU; without, the live ones, to be written before they
                change.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; ``tensors`` as in ``layout``, read at access.

        Raises:
            StateError: it does not fit; nothing has changed.
        """
        ...
