"""A Llama small enough for a training step in milliseconds, and constants of either scheme for it."""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplr.hparams import HParams

LOCALNET = Path(__file__).parents[2] / "src/tplr/localnet"
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}


@pytest.fixture
def tiny():
    def make(scheme: str, *, layers: int = 2, **changes) -> HParams:
        """``changes`` of the scheme's own group, or of what both have."""
        raw = json.loads((LOCALNET / "hparams.json").read_text())
        if scheme != raw["outer"]:
            del raw[raw["outer"]]
            raw |= json.loads((LOCALNET / f"{scheme}.json").read_text())
        del raw["_"]
        raw["model"] |= TINY | {"num_hidden_layers": layers}
        raw |= {"target_chunk": 16, "topk_compression": 16}
        for key, value in changes.items():
            (raw[scheme] if key in raw[scheme] else raw)[key] = value
        return HParams.model_validate(raw)

    return make


@pytest.fixture
def batches():
    """Four of two sequences; ``seed`` makes others."""

    def make(seed: int = 0, count: int = 4) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 64, (count, 2, 12))

    return make


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors made within that are still alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What an operation was given, and views of it, are nothing new.
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if not isinstance(one, torch.Tensor) or one.is_meta:
                continue
            if one.untyped_storage()._cdata not in given:
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            size = storage.nbytes()
            self.bytes += size
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


@pytest.fixture
def live() -> type[Live]:
    return Live
