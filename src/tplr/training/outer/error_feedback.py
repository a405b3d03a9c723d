"""Error feedback: the part of a miner's tensors that it has not sent yet, one tensor per parameter, and its window.

DeMo calls it momentum. It is reset, both live and after a restart,

- when it is older than ``stale_after_windows``: it belongs to a much older model;
- when all nodes applied an update of this miner that it still contains, so the miner would send that part twice. That
  update was sent right before a crash, so the saved tensors still contain it; or it was restored because its upload
  seemed to fail.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tplr.errors import StateError
from tplr.logging import logger
from tplr.training.device import host_copy
from tplr.training.saved import checked_copies


class ErrorFeedback:
    """The buffers and the rules that reset them.

    Args:
        parameters: those that this rank owns, float32; only their shapes and their device are used.
        offload: keep the tensors in host memory outside of ``on_device``.

    Attributes:
        tensors: whole, float32, by parameter name; empty until the first update.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], stale_after_windows: int, *, offload: bool = False
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._parameters = parameters
        self._stale_after = stale_after_windows
        self._offload = offload
        self._window: int | None = None
        self._taken_back: set[int] = set()  # windows whose updates were restored, but may have been received

    def begin(self, window: int) -> dict[str, torch.Tensor]:
        """Begin the update of a window; return the tensors where they are kept, zeros after a reset."""
        self.reset_if_stale(window)
        if not self.tensors:
            for name, one in self._parameters.items():
                self.tensors[name] = self._kept(torch.zeros(one.shape, device=one.device))
        self._window = window
        self._taken_back = {one for one in self._taken_back if window - one <= self._stale_after}
        return self.tensors

    def reset_if_stale(self, window: int) -> None:
        """Reset them if they are too old for an update of this window."""
        if self._window is not None and window - self._window > self._stale_after:
            self._reset(f"it is {window - self._window} windows old, stale_after_windows is {self._stale_after}")

    @contextmanager
    def on_device(self, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Hold these tensors on the parameters' device for the duration of the block, to be changed in place.

        Pass one group's names: a whole offloaded error feedback may not fit there.
        """
        there = self.copies(names)
        try:
            yield there
        finally:
            moved = [name for name, one in there.items() if one is not self.tensors[name]]
            for name in moved:
                self.tensors[name].copy_(there[name], non_blocking=True)
            if moved:
                torch.cuda.current_stream().synchronize()  # before the host tensors are read

    def copies(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return these tensors on the parameters' device: offloaded ones are copied, others are not."""
        return {name: self.tensors[name].to(self._parameters[name].device, non_blocking=True) for name in names}

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the memory in which it is kept between updates."""
        if not self._offload:
            return tensor
        host = host_copy(tensor)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # before the copy is read
        return host

    @property
    def empty(self) -> bool:
        """Whether nothing is in it, on all ranks: there was no update since the start or the last reset."""
        return self._window is None

    def restored(self, window: int) -> None:
        """Record that the tensors contain the update of a window again, because no node seems to have received it."""
        self._taken_back.add(window)

    def applied(self, window: int) -> None:
        """Record that all nodes applied this miner's update of a window; reset if the tensors still contain it."""
        known = self._window is not None and window <= self._window and window not in self._taken_back
        if not (self.empty or known):
            self._reset("an applied update is still in it: sent right before a restart, or restored")

    def _reset(self, reason: str) -> None:
        logger.warning("error-feedback buffer reset: %s", reason)
        self.tensors, self._window, self._taken_back = {}, None, set()

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return ``window`` (or None), ``taken_back`` (the restored windows) and ``tensors``; see ``OuterScheme``."""
        tensors = {name: one.to("cpu", copy=True) if copies else one for name, one in self.tensors.items()}
        return {"window": self._window, "taken_back": sorted(self._taken_back), "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            StateError: other keys or tensors than expected, or not finite; nothing has changed.
        """
        if state.keys() != {"window", "taken_back", "tensors"}:
            raise StateError(f"error feedback: keys {sorted(state)}; expected window, taken_back and tensors")
        found = checked_copies(state["tensors"], self._parameters, "error feedback")
        self.tensors = {name: self._kept(one) for name, one in found.items()}
        self._window, self._taken_back = state["window"], set(state["taken_back"])
