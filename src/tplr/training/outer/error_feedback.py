"""What a miner has not sent yet: a tensor for each parameter, and the window it belongs to.

DeMo calls it momentum, SparseLoCo error feedback. It is dropped, live and after a restart alike,

- when its newest part is older than ``stale_after_windows``: it describes a model that is long gone;
- when an update of this miner was applied of which it knows nothing. That update was sent right before a crash, and
  what was saved before still holds what it sent: it would be sent twice.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tplr.errors import StateError
from tplr.logging import logger
from tplr.training.saved import checked_copies


class ErrorFeedback:
    """``tensors`` are float32, by parameter name; none until something is kept.

    Args:
        parameters: of the model, float32; for their shapes and their device.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], stale_after_windows: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._parameters = parameters
        self._stale_after = stale_after_windows
        self._window: int | None = None
        self._taken_back = False

    def begin(self, window: int) -> dict[str, torch.Tensor]:
        """The tensors, for the update of a window to be made of them in place; zeros if none fit."""
        if self._window is not None and window - self._window > self._stale_after:
            self._drop(f"it is {window - self._window} windows old, stale_after_windows is {self._stale_after}")
        if not self.tensors:
            self.tensors = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}
        self._window, self._taken_back = window, False
        return self.tensors

    def taken_back(self) -> None:
        """What the update of the last ``begin`` held is in the tensors again: nobody else has it."""
        self._taken_back = True

    def applied(self, window: int) -> None:
        """Everyone applied an update of this miner's for a window."""
        known = self._window is not None and (
            window < self._window or (window == self._window and not self._taken_back)
        )
        if self.tensors and not known:
            self._drop("an update that it does not know of was applied; it still holds what was sent with it")

    def _drop(self, reason: str) -> None:
        logger.warning("what was kept unsent is dropped: %s", reason)
        self.tensors, self._window, self._taken_back = {}, None, False

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """``window`` (or None), ``taken_back`` and ``tensors``; see ``OuterScheme`` for ``copies``."""
        tensors = {name: one.to("cpu", copy=True) if copies else one for name, one in self.tensors.items()}
        return {"window": self._window, "taken_back": self._taken_back, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            StateError: other keys or tensors than expected, or not finite; nothing has changed.
        """
        if state.keys() != {"window", "taken_back", "tensors"}:
            raise StateError(f"unsent: keys {sorted(state)}; expected window, taken_back and tensors")
        self.tensors = checked_copies(state["tensors"], self._parameters, "unsent")
        self._window, self._taken_back = state["window"], state["taken_back"]
