"""A Llama small enough for a training step in milliseconds, and constants of either scheme for it."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplr.hparams import HParams, SparselocoParams
from tplr.localnet.plan import Scheme, scheme_constants
from tplr.model_check import MODEL_TYPES

# The settings in which each type differs from Llama, at toy size.
MORE = {
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
RATE = {"peak": 2e-3, "warmup_steps": 1, "t_max": 100, "start_factor": 0.5, "floor_factor": 0.1}
# Keys of a scheme's group that localnet's constants may leave out.
OPTIONAL = {name for name, one in SparselocoParams.model_fields.items() if not one.is_required()}
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}


@pytest.fixture
def tiny():
    def make(scheme: Scheme, *, layers: int = 2, **changes) -> HParams:
        """``changes`` are keys of the scheme's own group, or common keys."""
        raw = scheme_constants(scheme)
        raw["model"] |= TINY | {"num_hidden_layers": layers}
        raw |= {"target_chunk": 16, "topk_compression": 16}
        for key, value in changes.items():
            (raw[scheme] if key in raw[scheme] or key in OPTIONAL else raw)[key] = value
        return HParams.model_validate(raw)

    return make


@pytest.fixture
def hparams_of(tiny):
    def make(model_type: str, scheme: Scheme, **changes) -> HParams:
        """``tiny`` with another type of model."""
        rate = {"learning_rate" if scheme == "demo" else "inner_learning_rate": RATE}
        raw = tiny(scheme, **rate | changes).model_dump()
        activation = raw["model"].pop("hidden_act")
        tied = {"tie_word_embeddings": model_type == "gemma3_text"}
        raw["model"] |= (
            {"model_type": model_type, MODEL_TYPES[model_type]: activation} | MORE.get(model_type, {}) | tied
        )
        return HParams.model_validate(raw)

    return make


@pytest.fixture
def batches():
    """Return four batches of two sequences; another ``seed`` gives other ones."""

    def make(seed: int = 0, count: int = 4) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 64, (count, 2, 12))

    return make


class Live(TorchDispatchMode):
    """Counts the bytes of all live tensors that were created in the block, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Inputs of an operation, and views of them, are not new.
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
