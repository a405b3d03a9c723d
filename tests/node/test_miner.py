"""Error feedback after an update that was not published; real training and packing, and a store that refuses."""

import asyncio
import functools
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tplr.errors import StoreUnavailable
from tplr.hparams import HParams
from tplr.localnet.plan import Scheme, scheme_constants
from tplr.node import failpoints
from tplr.node.data_loader import WindowBatches
from tplr.node.miner import Miner
from tplr.node.model_lock import ModelLock
from tplr.node.replica import Replica
from tplr.node.train_state import TrainState
from tplr.node.window_time import WindowTime
from tplr.schemas import UploadBounds
from tplr.training.model import build_model
from tplr.training.schedule import learning_rate
from tplr.training.schemes import local_training

WINDOW = 5


TROUBLE = ["", "commit", "late commit", "commit stamped late", "update", "late update", "slow clock"]


def tiny_hparams(scheme: Scheme = "demo", **constants: int) -> HParams:
    raw = scheme_constants(scheme) | constants
    raw["model"] |= {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return HParams.model_validate(raw)


class Clock:
    """Stays at window 5 until it is changed."""

    window = WINDOW

    def seconds_left(self) -> float:
        return 100.0

    def seconds_since(self, window: int) -> float:
        return 1.0

    async def wait_for_window(self, window: int) -> int:
        self.window = window
        return window


class Bucket:
    """Own bucket and chain as the miner sees them. ``trouble``: the fault during publication."""

    uid = 3

    def __init__(self, clock: Clock, trouble: str) -> None:
        self._clock = clock
        self._trouble = trouble
        self.answers = asyncio.Event()  # to nothing before it
        self.answers.set()

    async def put_commit(self, window: int, sha256: str) -> SimpleNamespace:
        await self.answers.wait()
        if self._trouble == "commit":
            raise StoreUnavailable("scripted")
        if self._trouble == "late commit":
            self._clock.window += 1
        # The next window has begun, and this node has not seen its first block yet.
        return SimpleNamespace(last_modified=1001.0 if self._trouble == "commit stamped late" else 999.0)

    async def put_update(self, window: int, body: bytes) -> SimpleNamespace:
        if self._trouble == "update":
            raise StoreUnavailable("scripted")
        dates = {"late update": 2000.0, "slow clock": 1000.0 - 86400}
        return SimpleNamespace(last_modified=dates.get(self._trouble, 1000.0))

    async def upload_bounds(self, window: int, delta: float) -> SimpleNamespace:
        return UploadBounds(1000.0, 1003.0)


@pytest.mark.parametrize("trouble", TROUBLE)
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


async def test_an_update_is_sent_again_to_a_bucket_whose_clock_is_behind_for_as_long_as_it_can_count(monkeypatch):
    monkeypatch.setattr(UploadBounds, "resolution", 0.0)
    hparams, clock = tiny_hparams().model_copy(update={"time_window_delta_seconds": 3.0}), Clock()
    bucket, dates = Bucket(clock, ""), [999.9, 999.99, 1000.5]

    async def put_update(window: int, body: bytes) -> SimpleNamespace:
        return SimpleNamespace(last_modified=dates.pop(0))

    async def upload_bounds(window: int, delta: float) -> UploadBounds:
        return UploadBounds(1000.0, 1003.0, resolution=0.0)

    monkeypatch.setattr(bucket, "put_update", put_update)
    monkeypatch.setattr(bucket, "upload_bounds", upload_bounds)
    context = SimpleNamespace(comms=bucket, clock=clock, telemetry=SimpleNamespace(emit=lambda *_, **__: None))
    train_state = SimpleNamespace(parameters={})
    miner = Miner(SimpleNamespace(train_state=train_state, times=WindowTime()), None, context, hparams)
    assert await miner._publish(WINDOW, b"") is None
    assert not dates
    clock.window = WINDOW
    dates.append(900.0)
    assert await miner._publish(WINDOW, b"") == (
        "the bucket's clock is 100 s behind the chain's, and the bound ends in 2 s"
    )


BATCHES = 4


class Occupied(Miner):
    """Once a batch of the next window is trained, that training waits until the model is wanted, or is not any more.

    Attributes:
        published: the task that publishes the update before.
        expecting: before each batch of the next window, whether the weights have the expected step of that update.
    """

    published: asyncio.Task[None]
    bucket: Bucket
    expecting: list[bool]

    async def _read_ahead(self, window: int) -> None:
        pass  # it would move the clock

    def _out_of_time(self) -> bool:
        if self._training == WINDOW:
            return False
        self.expecting.append(self._train_state._own is not None)
        if len(self.expecting) == 2:
            self.published.get_loop().call_soon_threadsafe(self.bucket.answers.set)
            deadline = time.monotonic() + 60
            while not (self._replica.model.wanted() or self.published.done()):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        return False


class Unoccupied(Occupied):
    """Its bucket answers only when the next window is trained."""

    def _out_of_time(self) -> bool:
        if self._training != WINDOW:
            self.expecting.append(self._train_state._own is not None)
        return False


def pages_of(window: int) -> WindowBatches:
    return WindowBatches("0" * 64, np.random.default_rng(window).integers(0, 64, (BATCHES, 2, 12)))


@functools.cache
def following_update(scheme: Scheme, *, restored_after: int | None) -> bytes:
    """The update of the next window if that of this one is restored after so many of its batches; None: never."""
    hparams = tiny_hparams(scheme, outer_delay=1)
    state, meta = TrainState(build_model(hparams), hparams, Path("unused")), {"uid": 3, "pages_digest": "0" * 64}
    state.train(pages_of(WINDOW).batches, WINDOW)
    body = state.pack(window=WINDOW, batches=BATCHES, **meta)
    asked = iter(range(BATCHES))
    stats = state.train(pages_of(WINDOW + 1).batches, WINDOW + 1, pause=lambda: next(asked) == restored_after)
    assert stats.batches == (BATCHES if restored_after is None else restored_after)
    if restored_after is not None:
        state.restore_update(body, window=WINDOW, uid=3)
    if stats.paused:
        state.continue_training()
    return state.pack(window=WINDOW + 1, batches=BATCHES, **meta)


@pytest.mark.parametrize("role", [Occupied, Unoccupied])
@pytest.mark.parametrize(("scheme", "trouble"), [*(("muon", one) for one in TROUBLE), ("sparseloco", "late update")])
async def test_an_update_that_did_not_get_out_returns_while_the_next_window_is_trained(
    scheme, trouble, role, monkeypatch, tmp_path
):
    """An occupied miner is interrupted for it; else it waits with the next update, which has the rest of both."""
    monkeypatch.setattr(UploadBounds, "resolution", 0.0)
    hparams, clock, events = tiny_hparams(scheme, outer_delay=1), Clock(), []

    async def assigned(uid: int, window: int) -> WindowBatches:
        return pages_of(window)

    async def trained(name: failpoints.FailpointName) -> None:
        if name == "trained" and miner.expecting:
            bucket.answers.set()

    bucket, telemetry = Bucket(clock, trouble), SimpleNamespace(emit=lambda event, **what: events.append((event, what)))
    context = SimpleNamespace(comms=bucket, clock=clock, telemetry=telemetry)
    replica = Replica(build_model(hparams), hparams, context, tmp_path)
    miner = role(replica, SimpleNamespace(assigned=assigned, read_ahead=lambda *_: None), context, hparams)
    miner.bucket, miner.expecting = bucket, []
    state, before = replica.train_state, replica.train_state.digest()
    token = failpoints.hook.set(trained)
    try:
        body = await miner._make_update(WINDOW)
        assert body is not None
        bucket.answers.clear()
        miner.published = asyncio.create_task(miner._put_out(WINDOW, body))
        following = await miner._make_update(WINDOW + 1, after=miner.published)
    finally:
        failpoints.hook.reset(token)

    assert [what["window"] for event, what in events if event == "missed"] == [WINDOW] * bool(trouble)
    assert state.outer.state_dict()["taken_back"] == [WINDOW] * bool(trouble)
    interrupted = bool(trouble) and role is Occupied
    assert miner.expecting == ([True, True, False, False] if interrupted else [True] * BATCHES)
    after = (2 if role is Occupied else BATCHES) if trouble else None
    assert following == following_update(scheme, restored_after=after)
    assert (following == following_update(scheme, restored_after=None)) == (not trouble)
    assert state.digest() == before
