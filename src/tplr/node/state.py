"""A node's own state on disk: two generations of one checksummed file each, written atomically.

File: 32 bytes of SHA-256 over the rest, then a safetensors file; its metadata holds one JSON text. No pickle: a state
folder copied from elsewhere can be wrong, but it can't run anything.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tplr.errors import StateError
from tplr.files import atomic_writer
from tplr.logging import logger

NAMES = ("state-a.bin", "state-b.bin")
HASH_BYTES = 32


@dataclass(frozen=True)
class SavedState:
    """``window`` is the next one to apply: the tensors hold all before it."""

    window: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


class StateFolder:
    """Saves by turns into two files, so that the older generation survives whatever happens to the newer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0

    def save(self, window: int, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Write a generation. Raises StateError if the disk is full; the older generation stays."""
        text = json.dumps({"window": window, "values": values})
        body = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"state": text})
        with atomic_writer(self._folder / NAMES[self._next]) as file:
            file.write(hashlib.sha256(body).digest())
            file.write(body)
        self._next = 1 - self._next

    def load(self) -> SavedState | None:
        """The newest generation that is whole, or None; torn ones are named in the log and passed over."""
        for leftover in self._folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)  # of a process that was killed while it saved
        found: dict[int, SavedState] = {}
        for which, name in enumerate(NAMES):
            path = self._folder / name
            try:
                found[which] = _read(path)
            except FileNotFoundError:
                continue
            except StateError as error:
                logger.warning("saved state passed over: %s", error)
        if not found:
            return None
        newest = max(found, key=lambda which: found[which].window)
        self._next = 1 - newest
        return found[newest]


def _read(path: Path) -> SavedState:
    data = path.read_bytes()
    body = data[HASH_BYTES:]
    if hashlib.sha256(body).digest() != data[:HASH_BYTES]:
        raise StateError(f"{path}: checksum differs, the file is torn or was changed")
    try:
        header_bytes = int.from_bytes(body[:8], "little")
        state = json.loads(json.loads(body[8 : 8 + header_bytes])["__metadata__"]["state"])
        return SavedState(state["window"], load(body), state["values"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path}: not a state of this version: {error}") from error
