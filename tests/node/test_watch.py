"""``tplr watch`` on a recorded run: objects read from real buckets and a chain, once and while the run continues."""

import argparse
import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
from recording import Recording, recorded_run
from reports import score_report
from rich.console import Console

from tplr.config import Environment
from tplr.errors import ConfigError, StoreError
from tplr.exchange.scores import seal_of
from tplr.logging import logger
from tplr.node.arguments import add_arguments, node_arguments
from tplr.node.network_reader import NetworkReader
from tplr.node.replica import NodeContext
from tplr.schemas import Evaluation, LossChange, PeerObservation, PeerScore, ScoreReport, Software
from tplr.testing.s3server.faults import Status
from tplr.watch.command import watch
from tplr.watch.frame import render_frame
from tplr.watch.published import PublishedSource

START = 3


@dataclass
class Scene:
    """A run of two miners whose windows are recorded, and a reader of it."""

    stage: Any
    recording: Recording
    leader: NodeContext
    miners: tuple[NodeContext, ...]

    def source(self) -> PublishedSource:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        arguments = node_arguments(parser.parse_args([], argparse.Namespace(command="watch")))
        comms, stage = self.leader.comms, self.stage
        environment = Environment({"TPLR_S3_ENDPOINT": stage.server.endpoint})
        network = NetworkReader(arguments, environment, comms._connections, stage.hparams, comms)
        return PublishedSource(network, validator=None)

    async def look(self, source: PublishedSource) -> str:
        frame = await self.stage.drive(source.look())
        shown = StringIO()
        Console(file=shown, width=120).print(render_frame(frame))
        return shown.getvalue()

    async def record(self, **what: object) -> None:
        while self.leader.clock.window <= self.recording.window:
            await self.stage.pass_windows(1, self.leader.clock)
        await self.stage.drive(self.recording.record(**what))

    async def reports(self, window: int, node: NodeContext, **changes: object) -> None:
        """Publish the leader's report as this node's, with ``changes``."""
        seen = await self.leader.comms.get_report(0, window)
        await node.comms.put_report(seen.model_copy(update={"uid": node.comms.uid, **changes}))


@pytest.fixture
async def scene(staged) -> AsyncIterator[Scene]:
    async with recorded_run(staged, start=START) as run:
        yield Scene(*run)


def report(window: int) -> ScoreReport:
    change = LossChange(before=7.125, after=7.0, error=0.1, sequences=8)
    observed = PeerObservation(
        hotkey="somebody", included=True, evaluation=Evaluation(assigned=change, held_out=change)
    )
    score = PeerScore(hotkey="somebody", presence=1.0, credit=0.5, final=0.5)
    return score_report(
        window,
        observations={"1": observed},
        peer_scores={"1": score, "2": score.model_copy(update={"credit": 0.25})},
        struck={"2": ("wrong_pages",)},
        weights={"1": 0.75, "2": 0.25},
    ).sealed()


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if f"│ {name} " in line).strip("│ ").split()


async def test_a_run_as_anybody_sees_it(scene: Scene) -> None:
    await scene.recording.begin()
    source = scene.source()
    assert "no window is published yet" in await scene.look(source)
    await scene.record()
    await scene.record(senders=1)
    made = report(START)
    await scene.leader.comms.put_scores_seal(seal_of(made, weights_due=START + 2))
    await scene.leader.comms.put_scores(made)
    one, other = scene.miners
    await scene.reports(START, one)
    await scene.reports(START + 1, one)
    await scene.reports(START, other, fingerprint="f" * 64)
    text = await scene.look(source)
    assert re.search(r"window \d+, block \d+: \d+ s left of 2 s", text)
    assert "loss on held-out pages 7.125 (validator 0, window 3)" in text
    assert "credit and pay: window 3, by validator 0" in text
    assert "elections: 2 of 2 windows decided, the newest is 4 with 100% of the stake" in text
    assert "models differ" in text
    assert row(text, "validator 0") == ["validator", "0", "in", "step", "4", "7.125", "100%"]
    assert row(text, "miner 1") == ["miner", "1", "in", "step", "4", "7.125", "2", "of", "2", "0.5000", "0.750"]
    assert row(text, "miner 2") == ["miner", "2", "in", "step", "3", "1", "of", "1", "0.2500", "0.250"]
    assert "miner 2: its model differs from most nodes' after window 3" in text
    # The next poll continues.
    await scene.record()
    assert "elections: 3 of 3 windows decided, the newest is 5" in await scene.look(source)
    for _ in range(3):
        await scene.stage.pass_windows(4, scene.leader.clock)
    assert "the newest report of a validator is of window 5" in await scene.look(source)


async def test_a_node_that_is_older_than_the_network_is_said_so(scene: Scene) -> None:
    await scene.recording.begin()
    await scene.record()
    await scene.leader.comms.put_software(Software(uid=0, package="9.1", spec_version=2, since=50))
    await scene.miners[0].comms.put_software(Software(uid=1, package="9.1", spec_version=1, since=0))
    await scene.miners[1].comms.put_software(Software(uid=2, package="9.0", spec_version=2, since=50))
    text = " ".join((await scene.look(scene.source())).replace("│", " ").split())
    assert "miner 1: from window 50 on, the network follows version 2 of the rules, this node version 1" in text
    assert "miner 2: the network runs package 9.1, this node 9.0: upgrade it" in text
    assert "validator 0:" not in text


async def test_a_bucket_that_does_not_answer_and_one_that_holds_anything(scene: Scene) -> None:
    await scene.recording.begin()
    await scene.record()
    one, other = scene.miners
    await one.comms.own_store.put(f"debug-{START}-1-v1.json", b"[" * 60_000)
    scene.stage.server.faults.add(rf"^GET /{other.comms.own_store.name}/debug", Status(503), times=None)
    text = await scene.look(scene.source())
    assert row(text, "miner 1")[2:4] == ["no", "report"]
    assert row(text, "miner 2")[2] == "silent"
    assert "miner 2: its bucket does not answer" in text
    assert "validator 0 has published no scores of window 3" in text


def newest(shown: StringIO) -> str:
    """Return the newest of the frames that were drawn."""
    return shown.getvalue().rpartition("templar: ")[2]


async def test_it_goes_on_when_storage_was_away(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.recording.begin()
    await scene.record()
    source = scene.source()
    source.seconds = 0.05
    shown = StringIO()
    console = Console(file=shown, width=120, force_terminal=True)
    reading, failures = source.look, [StoreError("storage is away"), ConfigError("odd")]

    async def look() -> object:
        if source._first or not failures:
            return await reading()
        logger.warning("a request took long")
        raise failures.pop()

    monkeypatch.setattr(source, "look", look)
    watching = asyncio.create_task(watch(source, console))
    async with asyncio.timeout(60):
        while "storage is away" not in shown.getvalue():
            await scene.stage.drive(asyncio.sleep(0.01))
        # Only the newest problem is shown, however many other ones there were.
        assert "a request took long" in newest(shown)
        assert "odd" not in newest(shown)
        await scene.record()
        while "2 of 2 windows decided" not in newest(shown):
            await scene.stage.drive(asyncio.sleep(0.01))
        assert "a request took long" not in newest(shown)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
