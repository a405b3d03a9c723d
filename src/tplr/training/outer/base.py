"""What a node asks of an outer scheme, whichever it is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update

# A tensor seen as a matrix, a few of its rows at a time: which ones, and the rows themselves, which are the caller's.
RowBlocks = Iterator[tuple[slice, torch.Tensor]]


class OuterScheme(Protocol):
    """Holds references to a model's live parameters and, on a miner, what was not sent yet.

    ``step`` counts the outer steps of the run, from 0: windows in which nobody's update was applied are none.
    """

    spec: PayloadSpec

    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        window: int,
        uid: int,
        pages_digest: str,
        batches: int,
    ) -> bytes:
        """A miner's update, from the tensors of its ``LocalWork``. Changes what is kept unsent, never the parameters.

        Raises:
            TrainingError: an entry is not finite; nothing has changed.
            ValueError: tensors are missing, unknown or of another shape.
        """
        ...

    def restore(self, body: bytes, *, window: int, uid: int) -> None:
        """Nobody got the update that was packed last: what it held is unsent again, up to float32's rounding."""
        ...

    def own_applied(self, window: int) -> None:
        """Everyone applied an update of this node's for that window; see ``error_feedback.py``."""
        ...

    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """The outer step, in place: the same updates give the same bytes, in whatever order they are.

        Raises:
            ValueError: updates of different windows, of one uid twice, or of another layout.
        """
        ...

    def trial_step(self, name: str, update: Update, *, step: int) -> RowBlocks:
        """One parameter as a part (``eval_lr_factor``) of one update's step alone would leave it."""
        ...

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """What must survive a restart: JSON values and ``tensors`` by name, on the CPU and the caller's own; without
        ``copies`` the live ones, for who writes them down before they change.

        Tensors named ``shared.*`` are alike on all nodes, as the parameters are; the others are this miner's.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; raises ``StateError`` and changes nothing if it does not fit."""
        ...
