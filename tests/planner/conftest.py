"""Shipped runs, a host, and models small enough to measure."""

from pathlib import Path

import pytest

from tplr.hparams import HParams, load_hparams
from tplr.planner.host import ACCELERATORS, GIB, Host

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo() -> HParams:
    return load_hparams(ROOT / "hparams-demo.json")


@pytest.fixture
def sparseloco() -> HParams:
    return load_hparams(ROOT / "hparams-sparseloco.json")


@pytest.fixture
def default() -> HParams:
    return load_hparams(ROOT / "hparams.json")


@pytest.fixture
def host():
    def make(gpu: str | None = "h200", **changes) -> Host:
        values = {"ranks": 1, "host_memory": 512 * GIB, "disk": 2000 * GIB, "down": 500e6, "up": 110e6} | changes
        return Host(accelerator=ACCELERATORS[gpu] if gpu else None, **values)

    return make


@pytest.fixture
def sized():
    """Return a run's constants with another model size."""

    def make(hparams: HParams, *, sequence_length: int = 256, batch_size: int = 4, precision="bfloat16", **model):
        model = {"max_position_embeddings": sequence_length, **model}
        changes = {"sequence_length": sequence_length, "batch_size": batch_size, "precision": precision}
        return hparams.model_copy(update={"model": hparams.model.model_copy(update=model), **changes})

    return make
