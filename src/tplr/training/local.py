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
# Moves the live weights by +1 or -1 times the expected step of updates that are not applied yet.
Expect = Callable[[int], None]


def never() -> bool:
    """Return False: the default of ``stop`` and ``pause``, which trains on all batches."""
    return False


@dataclass
class TrainStats:
    """Statistics of a window's training.

    Attributes:
        losses: sum of the batches' mean losses, in nats per token.
        batches: number of batches trained on.
        tokens: number of tokens in them.
        skipped: number of batches skipped because a loss or a gradient was not finite.
        stopped: whether the time ended before the batches.
        paused: whether training continues later.
    """

    losses: float = 0.0
    batches: int = 0
    tokens: int = 0
    skipped: int = 0
    stopped: bool = False
    paused: bool = False

    @property
    def loss(self) -> float:
        """Mean loss over the batches; NaN if no batch was done."""
        return self.losses / self.batches if self.batches else math.nan


@dataclass
class Unfinished:
    """The state of a window's paused training.

    Attributes:
        step: number of outer steps of the model on which the window is trained.
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
        tensors: float32, by parameter name, with the parameter's shape and sharding, for ``OuterScheme.pack``; empty if
            no batch was done, or the training is paused.
        train_stats: statistics of the window so far.
        unfinished: set if the training was paused; pass it to ``run`` to continue.
    """

    tensors: dict[str, torch.Tensor]
    train_stats: TrainStats
    unfinished: Unfinished | None = None


class LocalTraining(Protocol):
    """Trains window by window. One object per run keeps the state between windows; each rank has its shards.

    Attributes:
        layout: for each tensor of the state, by name, the parameter that has its shape and shards.
        moves: whether ``run`` changes the model's weights or the kept state while it runs.
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
        """Train on ``batches`` until they end or ``stop()``, called before each batch, returns True.

        Afterwards the model's weights are unchanged and its ``grad`` fields empty: only the outer step moves a model.

        If training moves the weights, it also ends when ``pause()``, called before each inner step, returns True; the
        outer step may then be taken. Another call with ``unfinished`` and the same batches continues the training: it
        adds the change so far to the model's weights at that time.

        Args:
            batches: (batches, B, T) token ids.
            step: number of outer steps of the model on which the window is trained.
            expect: ``expect(1)`` moves the model's weights to those to train from; ``expect(-1)`` reverses it.
            before: copies of this rank's rows of the model's weights, if they exist already.
            unfinished: result of the paused call; this call consumes it.
        """
        ...

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the state that must survive a restart: JSON values, and ``tensors`` by name.

        Args:
            copies: return tensors as independent copies on the CPU; otherwise the live tensors, which must be written
                before they change.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; ``tensors`` as in ``layout``, read at access.

        Raises:
            StateError: it does not fit; nothing has changed.
        """
        ...
