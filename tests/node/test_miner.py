"""Error feedback after an update that was not published; real training and packing, and a store that refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tplr.errors import StoreUnavailable
from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.node.data_loader import WindowBatches
from tplr.node.miner import Miner
from tplr.node.model_lock import ModelLock
from tplr.node.train_state import TrainState
from tplr.node.window_time import WindowTime
from tplr.schemas import UploadBounds
from tplr.training.model import build_model
from tplr.training.schedule import learning_rate
from tplr.training.schemes import local_training

WINDOW = 5


def tiny_hparams() -> HParams:
    raw = scheme_constants("demo")
    raw["model"] |= {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return HParams.model_validate(raw)


class Clock:
    """Stays at window 5 until it is changed."""

    window = WINDOW

    def seconds_left(self) -> float:
        return 100.0

    async def wait_for_window(self, window: int) -> int:
        self.window = window
        return window


class Bucket:
    """Own bucket and chain as the miner sees them. ``trouble``: the fault during publication."""

    uid = 3

    def __init__(self, clock: Clock, trouble: str) -> None:
        self._clock = clock
        self._trouble = trouble

    async def put_commit(self, window: int, sha256: str) -> None:
        if self._trouble == "commit":
            raise StoreUnavailable("scripted")
        if self._trouble == "late commit":
            self._clock.window += 1

    async def put_update(self, window: int, body: bytes) -> SimpleNamespace:
        if self._trouble == "update":
            raise StoreUnavailable("scripted")
        return SimpleNamespace(last_modified=2000.0 if self._trouble == "late update" else 1000.0)

    async def upload_bounds(self, window: int, delta: float) -> SimpleNamespace:
        return UploadBounds(1000.0, 1003.0)


@pytest.mark.parametrize("trouble", ["", "commit", "late commit", "update", "late update"])
async def test_an_update_that_did_not_get_out_returns_to_the_error_feedback(trouble, monkeypatch, tmp_path):
    monkeypatch.setattr(UploadBounds, "resolution", 0.0)  # otherwise each of these would wait for a second
    hparams, clock, events = tiny_hparams(), Clock(), []
    model = build_model(hparams)
    parameters = dict(model.named_parameters())

    train_state = TrainState(model, hparams, tmp_path)
    train_state.global_step = 2
    lock = ModelLock()  # nothing is being saved
    replica = SimpleNamespace(train_state=train_state, model_to_change=lambda: lock, times=WindowTime(), model=lock)
    pages = WindowBatches("0" * 64, np.random.default_rng(0).integers(0, 64, (2, 2, 12)))

    async def assigned(uid: int, window: int) -> WindowBatches:
        return pages

    telemetry = SimpleNamespace(emit=lambda event, **fields: events.append((event, fields)))
    data_loader = SimpleNamespace(assigned=assigned, read_ahead=lambda uid, window: None)
    context = SimpleNamespace(comms=Bucket(clock, trouble), clock=clock, telemetry=telemetry)
    miner = Miner(replica, data_loader, context, hparams)
    body = await miner._make_update(WINDOW)
    assert body is not None
    await miner._put_out(WINDOW, body)

    kept = train_state.outer.state_dict()
    assert kept["taken_back"] == [WINDOW] * bool(trouble)
    assert [event for event, _ in events if event == "missed"] == ["missed"] * bool(trouble)
    gradient = local_training(parameters, hparams).run(model, pages.batches, step=2).tensors["lm_head.weight"]
    momentum = gradient * learning_rate(2, hparams.demo.learning_rate)
    assert torch.allclose(kept["tensors"]["lm_head.weight"], momentum, atol=1e-7, rtol=1e-3) == bool(trouble)
