"""A window that electors have decided to be void: every node applies nothing, live, later and when it is checked.

Three electors with real keys, buckets and chain; two of them have more than half of the stake, and decide.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from recording import Recording

from tplr.exchange.gather import GatherResult
from tplr.node.audit import Auditor
from tplr.node.replica import NodeContext, Replica
from tplr.node.train_state import TrainState
from tplr.training.fingerprint import digest
from tplr.training.model import build_model

START = 3
VALIDATORS, MINERS = ("validator", "validator-2", "validator-3"), ("miner-1", "miner-2")


class Scene:
    """A recorded run of two miners and three electors, and a newcomer."""

    def __init__(self, stage: Any, recording: Recording, newcomer: NodeContext) -> None:
        self.stage = stage
        self.recording = recording
        self.newcomer = newcomer

    async def record(self, **what: bool) -> GatherResult[Any]:
        while self.newcomer.clock.window <= self.recording.window:
            await self.stage.pass_windows(1, self.newcomer.clock)
        return await self.stage.drive(self.recording.record(**what))

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Replica]:
        async with self.stage.replica(self.stage.setup("miner-3"), self.newcomer) as replica:
            await self.stage.drive(replica.open(START))
            yield replica

    async def advance(self, replica: Replica) -> None:
        await self.stage.drive(replica.advance(until=self.recording.window))
        assert digest(replica.train_state.parameters) == digest(self.recording.train_state.parameters)


@pytest.fixture
async def scene(staged: Any) -> AsyncIterator[Scene]:
    constants = {"blocks_per_window": 4, "manifest_timeout_seconds": 0.1, "gradient_retention_windows": 10**6}
    async with staged(miners=3, validators=3, by_hand=True, **constants) as stage:
        contexts = {name: await stage.context(stage.setup(name)) for name in (*VALIDATORS, *MINERS, "miner-3")}
        async with stage.running(*(one.clock.run() for one in contexts.values())):
            for one in contexts.values():
                await one.comms.refresh()
            newcomer = contexts["miner-3"]
            while newcomer.clock.window <= START:
                await stage.pass_windows(1, newcomer.clock)
            leader, *others = (contexts[name].comms for name in VALIDATORS[:2])
            miners = [contexts[name].comms for name in MINERS]
            folder = stage.folder("recording")
            recording = Recording(leader, miners, stage.hparams, start=START, folder=folder, others=others)
            await recording.begin()
            yield Scene(stage, recording, newcomer)


async def test_it_is_applied_as_nothing_live_and_by_who_comes_later(scene: Scene) -> None:
    await scene.record()
    async with scene.opened() as replica:
        await scene.advance(replica)
        before = digest(replica.train_state.parameters)
        await scene.record(void=True)
        await scene.advance(replica)
        assert digest(replica.train_state.parameters) == before
        await scene.record()
        await scene.advance(replica)
    applied = scene.stage.of("applied", "miner-3")
    assert [(event["window"], len(event["included"])) for event in applied] == [
        (START, 2),
        (START + 1, 0),
        (START + 2, 2),
    ]


async def test_who_comes_later_applies_nothing_of_it(scene: Scene) -> None:
    for void in (False, True, False):
        await scene.record(void=void)
    async with scene.opened() as replica:
        await scene.advance(replica)
        assert replica.window == START + 3


async def test_who_applied_what_it_found_before_the_decision_rolls_back(scene: Scene) -> None:
    await scene.record()
    async with scene.opened() as replica:
        await scene.advance(replica)
        void = await scene.record(void=True)
        assert scene.recording.found
        assert len(scene.recording.found.updates) == 2
        await scene.stage.drive(replica.gather())
        await scene.stage.drive(replica.apply(replace(scene.recording.found, published=False)))
        await replica.wait_for_save()
        await scene.record()
        await scene.advance(replica)
    assert [event["window"] for event in scene.stage.of("rolled_back", "miner-3")] == [void.window]


@pytest.mark.parametrize("liars", [1, 2])
async def test_one_elector_s_fingerprints_send_nobody_back_those_of_most_do(scene: Scene, liars: int) -> None:
    """The leader, which has the most stake, lies about two windows; with the second one it has more than half."""
    async with scene.opened() as replica:
        for _ in range(2):
            await scene.advance(replica)
            window = scene.recording.window
            await scene.record()
            for elector in scene.recording._electors[:liars]:
                report = await elector.get_report(elector.uid, window)
                await elector.put_report(report.model_copy(update={"fingerprint": "f" * 64}))
        await scene.advance(replica)
        await scene.record()
        await scene.advance(replica)
        assert bool(scene.stage.of("rolled_back", "miner-3")) == (liars == 2)


async def test_an_audit_agrees_with_who_applied_nothing_and_with_nobody_else(scene: Scene, tmp_path: Path) -> None:
    for void in (False, True, False):
        await scene.record(void=void)

    async def audited() -> Any:
        train_state = TrainState(build_model(scene.stage.hparams), scene.stage.hparams, tmp_path)
        train_state.start_window = START
        comms, hparams = scene.newcomer.comms, scene.stage.hparams
        auditor = Auditor(train_state, START, cast(Any, None), comms, hparams, validator=0)
        return await scene.stage.drive(auditor.audit(START + 2, scores_from=START + 3))

    assert await audited() is None
    leader = scene.recording._leader
    report = await leader.get_report(leader.uid, START + 1)
    claimed = await leader.get_report(leader.uid, START)
    await leader.put_report(report.model_copy(update={"included": claimed.included}))
    found = await audited()
    assert found
    assert (found.window, found.what) == (START + 1, "update of uid 1")
