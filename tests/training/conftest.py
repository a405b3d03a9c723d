"""A Llama small enough for a training step in milliseconds, and constants of either scheme for it."""

import json
from pathlib import Path

import numpy as np
import pytest

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
