"""Local training: from a window's batches to the tensors that the miner packs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Stop = Callable[[], bool]
# Moves the live weights by +1 or -1 times what is expected of updates that are not applied yet.
Expect = Callable[[int], None]


def never() -> bool:
    """The default of ``stop`` and ``pause``: train on all batches."""
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
        paused: training continues later.
    """

    losses: float = 0.0
    batches: int = 0
    tokens: int = 0
    skipped: int = 0
    stopped: bool = False
    paused: bool = False

    @property
    def loss(self) -> float:
        """Mean over the batches; NaN if no batch was done."""
        return self.losses / self.batches if self.batches else math.nan


@dataclass
class Unfinished:
    """A window's training until it was paused.

    Attributes:
        step: number of outer steps of the model that the window is trained on.
        index: the next inner step.
        change: the model's weights minus the trained ones, as ``LocalWork.tensors``; empty before the first batch.
    """

    step: int
    index: int = 0
    train_stats: TrainStats = field(default_factory=TrainStats)
    change: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalWork:
    """Result of a window's training.

    Attributes:
        tensors: float32, by parameter name, in the parameter's shape and sharded as it is, for ``OuterScheme.pack``;
            empty if no batch was done, or it is not at its end.
        train_stats: of the window until now.
        unfinished: the training was paused; ``run`` continues it.
    """

    tensors: dict[str, torch.Tensor]
    train_stats: TrainStats
    unfinished: Unfinished | None = None


class LocalTraining(Protocol):
    """Trains window by window; one object for a run, which keeps state between windows, on each rank its shards.

    Attributes:
        layout: tensors of the state by name, each as the parameter that has its shape and shards.
        moves: while ``run`` runs, the model's weights or the kept state differ from those before it.
    """

    moves: bool

    @property
    def layout(self) -> Mapping[str, torch.Tensor]: ...

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
        """Train on ``batches`` until they end or ``stop()``, asked before each batch, returns True.

        Afterwards the model's weights are as before and its ``grad`` fields empty: only the outer step moves a model.

        Where training moves the weights, it also ends when ``pause()``, asked before each inner step, returns True; the
        outer step may then be taken. Another call with ``unfinished`` continues it, with the same batches, from the
        model as it then is and as far from it as training had come.

        Args:
            batches: (batches, B, T) token ids.
            step: number of outer steps of the model that the window is trained on.
            expect: the weights to train from are the model's after ``expect(1)``; ``expect(-1)`` reverses it.
            before: copies of this rank's rows of the model's weights, if there are some already.
            unfinished: of the call that was paused; it is used up.
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
