"""A window that electors have voided: every node applies nothing, live, later and in an audit.

Three electors with real keys, buckets and chain; two of them have more than half of the stake, and decide.
"""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from recording import Recording

from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.node.audit import Auditor
from tplr.node.data_loader import WindowBatches
from tplr.node.observation import score_report
from tplr.node.observer import Observer
from tplr.node.replica import NodeContext, Replica
from tplr.node.train_state import TrainState
from tplr.scoring.profiles import score_board
from tplr.seeds import derive
from tplr.training.fingerprint import digest
from tplr.training.model import build_model

START = 3
VALIDATORS, MINERS = ("validator", "validator-2", "validator-3"), ("miner-1", "miner-2")


class Scene:
    """A recorded run of two miners and three electors, and a newcomer."""

    def __init__(self, stage: Any, recording: Recording, contexts: dict[str, NodeContext]) -> None:
        self.stage = stage
        self.recording = recording
        self.contexts = contexts
        self.newcomer = contexts["miner-3"]

    async def record(self, **what: Any) -> GatherResult[Any]:
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
    constants = {
        "blocks_per_window": 4,
        "manifest_timeout_seconds": 0.1,
        "gradient_retention_windows": 10**6,
        "sealed_scores": False,
        "evaluation_sequences": 8,
    }
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
            yield Scene(stage, recording, contexts)


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


@pytest.mark.long
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


@pytest.mark.parametrize("liars", [1, pytest.param(2, marks=pytest.mark.long)])
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


class Pages:
    """The part of ``WindowDataLoader`` that scoring uses: random tokens."""

    def __init__(self, hparams: HParams) -> None:
        self._hparams = hparams

    async def digest(self, uid: int, window: int) -> str:
        return "0" * 64  # the digest in every recorded update

    async def assigned(self, uid: int, window: int) -> WindowBatches:
        return self._draw(uid, window)

    async def held_out(self, window: int, hotkey: str, apart_from: object) -> WindowBatches:
        return self._draw(-1, window)

    def read_ahead(self, uid: int, window: int) -> None:
        pass

    def _draw(self, *seed: int) -> WindowBatches:
        shape, size = (1, 8, self._hparams.sequence_length), self._hparams.model.vocab_size
        tokens = np.random.default_rng(derive("made-up", *seed)).integers(0, size, shape)
        return WindowBatches(hashlib.sha256(tokens.tobytes()).hexdigest(), tokens)


class Scorer:
    """The leading validator: it scores windows as they arrive, and publishes its model's state after each."""

    def __init__(self, scene: Scene, pages: Pages) -> None:
        self._scene = scene
        self._context = scene.contexts["validator"]
        self._pages = cast(Any, pages)
        self._board = score_board(scene.stage.hparams)
        self.comms = self._context.comms
        self.roll_back()

    def roll_back(self) -> None:
        hparams = self._scene.stage.hparams
        self._train_state = TrainState(build_model(hparams), hparams, Path())
        self._train_state.start_window = START

    async def score(self, gathered: GatherResult[Any]) -> None:
        observer = Observer(self._train_state, self._pages, self._context, self._scene.stage.hparams)
        seen = await observer.observe(gathered, self._board)
        assert not seen.faults
        outcome = self._board.see(seen.evidence)
        report = score_report(seen, outcome, self._board, uid=self.comms.uid, weights_set=None)
        await self.comms.put_scores(report)

    async def apply(self, gathered: GatherResult[Any]) -> None:
        self._train_state.apply([one.update for one in gathered.updates])
        block_hash = await self.comms.window_hash(gathered.window + 1)
        await self.comms.put_report(self._train_state.report(gathered, uid=self.comms.uid, block_hash=block_hash))


@pytest.fixture
async def voided_later(scene: Scene) -> tuple[Scorer, Callable[[int], Any]]:
    """A validator that scored two windows before it learned that the first one was void; and an audit of all
    windows."""
    pages = Pages(scene.stage.hparams)
    scorer = Scorer(scene, pages)
    lived = []
    for window in range(START, START + 4):
        lived.append(await scene.record(report=False, voided=(START + 1,) if window == START + 3 else ()))
        if window < START + 3:
            await scene.stage.drive(scorer.score(lived[-1]))
            await scene.stage.drive(scorer.apply(lived[-1]))
    scorer.roll_back()
    lived[1] = replace(lived[1], updates=())
    for gathered in lived:
        if gathered.window == START + 3:
            await scene.stage.drive(scorer.score(gathered))
        await scene.stage.drive(scorer.apply(gathered))

    async def audited(until: int) -> tuple[Any, list[str]]:
        train_state = TrainState(build_model(scene.stage.hparams), scene.stage.hparams, Path())
        train_state.start_window = START
        comms, hparams = scene.newcomer.comms, scene.stage.hparams
        auditor = Auditor(train_state, START, cast(Any, pages), comms, hparams, validator=0)
        found = await scene.stage.drive(auditor.audit(until, scores_from=START))
        return found, [text for text in auditor.unverified if "voided" in text]

    return scorer, audited


@pytest.mark.long
async def test_who_scored_a_window_before_it_was_voided_is_no_liar(voided_later: Any) -> None:
    """Its scores are based on the set that was decided first, and those of the next window on that model."""
    scorer, audited = voided_later
    found, believed = await audited(START + 3)
    assert found is None
    assert [text.partition(":")[0] for text in believed] == [f"window {START + 1}", f"window {START + 2}"]
    assert "uid 1 included: published True, found False" in believed[0]
    assert f"window {START + 1} was voided, possibly after they were computed with another model" in believed[1]

    # Values that do not depend on the model are still compared.
    report = await scorer.comms.get_scores(scorer.comms.uid, START + 1)
    await scorer.comms.put_scores(report.model_copy(update={"weights": {"1": 1.0}}).sealed())
    found, _ = await audited(START + 1)
    assert found is not None
    assert (found.window, found.what) == (START + 1, "weights")
