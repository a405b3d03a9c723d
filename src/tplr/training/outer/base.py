"""What a node asks of an outer scheme, whichever it is."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update


class OuterScheme(Protocol):
    """Holds references to a model's live parameters and, on a miner, what was not sent yet."""

    spec: PayloadSpec

    def pack(
        self,
        gradients: Mapping[str, torch.Tensor],
        *,
        step: int,
        window: int,
        uid: int,
        pages_digest: str,
        batches: int,
    ) -> bytes:
        """A miner's update of a window. Changes what is kept for later windows, never the parameters."""
        ...

    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """The outer step, in place: the same updates give the same bytes, in whatever order they are."""
        ...

    def probe(self, update: Update, *, step: int) -> AbstractContextManager[None]:
        """Within the context the parameters are as one update alone would move them; after it, as they were."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a miner must keep over a restart; on the CPU, and the caller's own."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; raises ``StateError`` and changes nothing if it does not fit."""
        ...
