"""A window that can't be gathered changes no score, and a restart loses no scores."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from reports import score_report

from tplr.clock import Tick
from tplr.errors import ObjectNotFound, TrainingError, WindowLost
from tplr.hparams import HParams, load_hparams
from tplr.node.replica import NodeContext, Replica
from tplr.node.validator import Validator
from tplr.node.window_time import WindowTime
from tplr.schemas import Evidence, PeerObservation, Reason, ScoreReport
from tplr.telemetry import Telemetry
from tplr.telemetry.events import Event
from tplr.training.model import build_model

LOST = 7


class Clock:
    """Three windows, the first of which completes ``LOST``."""

    block = 0

    def __init__(self, offset: int) -> None:
        self._first = LOST + offset

    async def ticks(self) -> AsyncIterator[Tick]:
        for window in range(self._first, self._first + 3):
            yield Tick(window, 0)


class Lost:
    """A replica that finds no window's updates, as if they were deleted after their set was published."""

    train_state = SimpleNamespace(start_window=0)
    folder = Path("nowhere")

    def __init__(self) -> None:
        self.window = LOST
        self.times = WindowTime()
        self.asked: list[int] = []
        self.advanced: list[int] = []

    def register(self, name: str, part: object) -> None:
        pass

    async def open(self, start_window: int) -> None:
        pass

    async def advance(self, until: int) -> None:
        self.advanced.append(until)
        self.window = until

    async def gather(self) -> None:
        self.asked.append(self.window)
        raise WindowLost(f"window {self.window}: uids [3] are in its included set, and their updates can't be had")


class Made:
    """The bucket of a validator that has scored a window with unsealed reports, with one miner on probation."""

    def __init__(self, *windows: int) -> None:
        self._windows = windows

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        if window not in self._windows:
            raise ObjectNotFound("no scores")
        return score_report(window, observations={"3": PeerObservation(hotkey="miner")})


async def nothing(_: int) -> None:
    pass


def of(hparams: HParams, made: Made, folder: Path = Lost.folder) -> tuple[Validator, Lost, list[Event]]:
    """A validator that has just started, its replica, and its events."""
    events: list[Event] = []
    comms = SimpleNamespace(
        uid=1,
        clock=SimpleNamespace(block=0),
        electors=frozenset(),
        metagraph=SimpleNamespace(neurons=()),
        copy_run=nothing,
        get_scores=made.get_scores,
    )
    context = NodeContext(
        comms=cast(Any, comms),
        clock=cast(Any, Clock(hparams.validator_offset)),
        telemetry=Telemetry(role="validator", uid=1, listeners=(events.append,)),
    )
    replica = Lost()
    replica.folder = folder
    return Validator(cast(Replica, replica), cast(Any, None), context, hparams), replica, events


async def follow(validator: Validator) -> None:
    await validator._follow(cast(Any, SimpleNamespace(create_task=lambda paying: paying.close())))


async def test_what_was_scored_after_the_saved_state_is_still_evidence(tmp_path: Path) -> None:
    """It is published, so an audit of later scores requires it. A window that was only applied is not evidence."""
    hparams = load_hparams()
    kept = score_report(LOST - 1, observations={"3": PeerObservation(hotkey="miner", verdict=Reason.EMPTY)})
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / f"window-{LOST - 1}-v{hparams.version}").write_text(kept.model_dump_json())
    validator, _, events = of(hparams, Made(LOST - 3), tmp_path)
    before = Evidence(window=LOST - 4, observations={"3": PeerObservation(hotkey="miner")})
    validator._board.see(before)  # as saved
    await follow(validator)
    scores = [event for event in events if event["event"] == "scores"]
    assert [event["window"] for event in scores] == [LOST - 3, LOST - 1]
    assert [event["struck"] for event in scores] == [{}, {}]  # the strike was counted before the restart
    assert validator._board.follows_from == (LOST - 4, LOST - 3)
    assert validator._board.newest == LOST - 1


async def test_a_window_that_is_lost_is_reported_and_changes_no_score() -> None:
    validator, replica, events = of(load_hparams(), Made())
    await follow(validator)
    # ``advance`` continues, with a later checkpoint if there is one.
    assert replica.advanced == replica.asked == [LOST, LOST + 1, LOST + 2]
    problems = [event for event in events if event["event"] != "window_time"]
    assert [event["event"] for event in problems] == ["problem"] * 3
    assert f"window {LOST}: uids [3]" in problems[0]["text"]
    assert validator._board.peer_scores == {}


async def test_an_evaluation_ends_with_the_node_between_two_batches(tmp_path: Path) -> None:
    """Its thread can't be cancelled, and the process would wait for it."""
    raw = load_hparams().model_dump()
    raw["model"] |= {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    hparams = HParams.model_validate(raw)
    model, passes = build_model(hparams), []
    begun, ended = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        passes.append(1)
        begun.set()
        assert ended.wait(60)

    model.get_input_embeddings().register_forward_pre_hook(wait)
    async with Replica(model, hparams, cast(Any, SimpleNamespace(comms=None)), tmp_path) as replica:
        batches = np.zeros((3, 2, 12), np.int64)
        evaluation = asyncio.create_task(asyncio.to_thread(replica.train_state.baseline, batches))
        assert await asyncio.to_thread(begun.wait, 60)
    ended.set()
    with pytest.raises(TrainingError, match="about to end"):
        await evaluation
    assert len(passes) == 1
