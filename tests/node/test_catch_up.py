"""A node that joins late, was absent or diverged ends with the network's bytes; recorded runs, real store and chain."""

import asyncio
import contextlib
import hashlib
import shutil
import threading
from collections.abc import AsyncIterator

import pytest
import torch
from deciding import publish_decision
from included import included_set
from recording import Recording

from tplr.chain.ledger import Ledger
from tplr.errors import ConfigError
from tplr.exchange.aggregates import assemble
from tplr.exchange.checkpoints import fetch_manifest, publish
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import load_state, reading_state
from tplr.node.replica import NodeContext, Replica
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.testing.s3server import Delay, Status
from tplr.training.fingerprint import digest
from tplr.training.model import build_model

START = 3


class Scene:
    """A recorded run of two miners, and a newcomer."""

    def __init__(
        self, stage, recording: Recording, leader: NodeContext, newcomer: NodeContext, miners: tuple[NodeContext, ...]
    ) -> None:
        self.miners = miners
        self.stage = stage
        self.recording = recording
        self.leader = leader
        self.newcomer = newcomer

    async def record(self, windows: int = 1, **what: bool) -> GatherResult:
        for _ in range(windows):
            if self.newcomer.clock.window <= self.recording.window:
                await self.stage.pass_windows(1, self.newcomer.clock, self.leader.clock)
            # A window's hash is known once its first block is final.
            recorded = await self.stage.drive(self.recording.record(**what))
        return recorded

    async def forget_updates(self) -> None:
        for miner in self.miners:
            for info in await miner.comms.own_store.list("gradient-"):
                await miner.comms.own_store.delete(info.key)

    def replica(self) -> Replica:
        return self.stage.replica(self.stage.setup("miner-3"), self.newcomer)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Replica]:
        async with self.replica() as replica:
            await self.stage.drive(replica.open(START))
            yield replica

    async def advance(self, replica: Replica, until: int | None = None) -> None:
        await self.stage.drive(replica.advance(until=self.recording.window if until is None else until))

    def agrees(self, replica: Replica) -> bool:
        mine, recorded = replica.train_state, self.recording.train_state
        where = (replica.window, mine.global_step) == (self.recording.window, recorded.global_step)
        return where and digest(mine.parameters) == digest(recorded.parameters)

    def events_of(self, kind: str) -> list[dict]:
        return self.stage.of(kind, "miner-3")


@pytest.fixture
def scene(staged):
    @contextlib.asynccontextmanager
    async def opened(scheme: str = "demo", **constants) -> AsyncIterator[Scene]:
        usual = {"blocks_per_window": 4, "manifest_timeout_seconds": 0.1, "checkpoint_frequency": 2}
        # The test advances time, so nothing becomes too old on a slow machine.
        constants = usual | {"gradient_retention_windows": 10**6} | constants
        async with staged(miners=3, scheme=scheme, by_hand=True, **constants) as stage:
            names = ("validator", "miner-1", "miner-2", "miner-3")
            leader, one, other, newcomer = [await stage.context(stage.setup(name)) for name in names]
            nodes = (leader, one, other, newcomer)
            async with stage.running(*(node.clock.run() for node in nodes)):
                for node in nodes:
                    await node.comms.refresh()
                    await node.clock.wait_for_window(0)
                folder = stage.folder("recording")
                miners = [one.comms, other.comms]
                recording = Recording(leader.comms, miners, stage.hparams, start=START, folder=folder)
                while newcomer.clock.window <= START:
                    await stage.pass_windows(1, *(node.clock for node in nodes))
                await recording.begin()
                yield Scene(stage, recording, leader, newcomer, (one, other))

    return opened


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
async def test_joins_from_a_checkpoint_and_aggregates_when_the_updates_are_gone(
    scene, scheme, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("tplr.node.replica.LOG_INTERVAL", 0.0)
    caplog.set_level("INFO")
    async with scene(scheme) as run:
        await run.record(2)
        await run.recording.checkpoint()
        await run.record(3)
        await run.forget_updates()
        async with run.opened() as replica:
            assert replica.window == START + 2
            await run.advance(replica)
            assert run.agrees(replica)
        assert "catching up: 2 windows left, about " in caplog.text
        assert [event["window"] for event in run.events_of("applied")] == [START + 2, START + 3, START + 4]
        held = {START + 5: digest(run.recording.train_state.parameters)}
        # It resumes from its saved state.
        await run.record()
        async with run.opened() as replica:
            assert replica.window == START + 5
            await run.advance(replica)
            assert run.agrees(replica)
        # An audit finds the matching state among the two that the node has saved.
        held[START + 6] = digest(run.recording.train_state.parameters)
        reader, folder = NetworkReader(None, None, None, run.stage.hparams, run.newcomer.comms), str(replica.folder)
        for window, model in held.items():
            audited = reading_state(reader, folder, START, run.stage.folder("scratch"))
            assert await run.stage.drive(load_state(reader, audited, folder, until=window)) == window
            assert digest(audited.parameters) == model
        with pytest.raises(ConfigError, match=f"no saved state of this run of window {START + 4} or before"):
            await run.stage.drive(load_state(reader, audited, folder, until=START + 4))


async def test_only_electors_publish_checkpoints_and_who_lost_everything_finds_theirs(scene) -> None:
    async with scene() as run:
        stage, bucket = run.stage, run.newcomer.comms.own_store
        await run.record(2)
        async with run.opened() as replica:
            await run.advance(replica)
            await replica.wait_for_save()
            # Like miners when every node published its own checkpoints.
            saved = replica.train_state.saved()
            await run.newcomer.comms.publish_checkpoint(saved.folder)
            await run.record(2)
            await run.advance(replica)
            await replica.wait_for_save()
            async with asyncio.timeout(20):
                while await bucket.list("checkpoint-"):  # noqa: ASYNC110 - a background task deletes them
                    await asyncio.sleep(0.02)
        assert run.events_of("checkpoint") == []
        async with stage.replica(stage.setup("validator"), run.leader) as elector:
            await stage.drive(elector.open(START))
            await run.advance(elector)
            await stage.until(lambda: stage.of("checkpoint", "validator"))
        await run.forget_updates()
        shutil.rmtree(stage.folder("miner-3"))
        await run.record()
        async with run.opened() as replica:
            assert replica.window == START + 4
            await run.advance(replica)
            assert run.agrees(replica)
        assert [event["peer"] for event in run.events_of("restored")] == [0]


async def test_without_sets_and_aggregates_the_leaders_report_says_what_to_apply(scene, monkeypatch) -> None:
    asked, real = [], WindowUpdates.of

    async def counted(self, window: int) -> GatherResult:
        asked.append(window)
        return await real(self, window)

    monkeypatch.setattr(WindowUpdates, "of", counted)
    async with scene() as run:
        await run.record(3, included=False, aggregate=False)
        await run.record()
        async with run.opened() as replica:
            await run.advance(replica)
            assert run.agrees(replica)
        assert asked == [START, START + 1, START + 2, START + 3]  # ahead of the applied window, and each once


async def test_what_the_last_leader_published_is_found_and_carried_over_by_the_next(scene) -> None:
    async with scene() as run:
        await run.record(3)
        heir = run.miners[0]
        for window in range(START, START + 3):
            report = await run.leader.comms.get_report(run.leader.comms.uid, window)
            await heir.comms.put_report(report.model_copy(update={"uid": heir.comms.uid}))
        await heir.comms.copy_run(run.stage.hparams.start_horizon_windows)
        await run.forget_updates()
        admin = Ledger(run.stage.network.chain, clock=run.stage.clock)
        admin.set_stake(heir.comms.hotkey, 1e9)
        admin.set_permit(heir.comms.hotkey)
        admin.close()
        await run.stage.pass_windows(1, run.newcomer.clock, heir.clock)
        for node in (run.newcomer, heir):
            await node.comms.refresh()
        assert run.newcomer.comms.highest_stake_validator() == heir.comms.uid
        async with run.opened() as replica:
            await run.advance(replica)
            assert run.agrees(replica)

        # A set is the decision of its window's electors, regardless of the current electors.
        for window in range(START, START + 3):
            included = await heir.comms.get_included(window)
            report = await run.leader.comms.get_report(run.leader.comms.uid, window)
            assert included
            assert {str(one.uid): one.sha256 for one in included.included} == report.included
            assert await heir.comms.get_aggregate(included)


async def test_a_node_with_states_of_another_run_of_later_windows_saves_and_resumes(scene) -> None:
    async with scene() as run:
        other = run.stage.hparams.model_copy(update={"init_seed": run.stage.hparams.init_seed + 1})
        before = TrainState(build_model(other), other, run.stage.folder("miner-3"))
        before.start_window = 900
        for window in (1000, 1001):
            before.save(window, {})
        await run.record()
        async with run.opened() as replica:
            await run.advance(replica)
            await replica.wait_for_save()
        async with run.opened() as replica:
            assert replica.window == run.recording.window
            assert run.agrees(replica)


class Scores:
    """A part of a validator's state: sealed evidence, which is large on a full subnet."""

    def state_dict(self) -> dict[str, str]:
        return {"evidence": "sealed" * 300_000}

    def load_state_dict(self, state: dict[str, str]) -> None:
        assert state == self.state_dict()


async def test_a_checkpoint_contains_nothing_of_the_electors_own_records(scene) -> None:
    """They may be sealed, and would make its manifest larger than others accept."""
    async with scene() as run:
        stage = run.stage
        await run.record(2)
        async with stage.replica(stage.setup("validator"), run.leader) as elector:
            elector.register("scores", Scores())
            await stage.drive(elector.open(START))
            await run.advance(elector)
            await stage.until(lambda: stage.of("checkpoint", "validator"))
            checkpoint = (await run.newcomer.comms.checkpoints())[0]
            assert "sealed" not in str((await fetch_manifest(checkpoint)).values)
        async with run.opened() as replica:
            assert replica.window == START + 2  # it has used the checkpoint
        # On the elector's disk they are.
        async with stage.replica(stage.setup("validator"), run.leader) as elector:
            elector.register("scores", Scores())
            await stage.drive(elector.open(START))
            assert elector.window == START + 2


@pytest.mark.parametrize("killed", [False, True])
async def test_rolls_back_when_the_set_came_late_and_differs(scene, killed: bool) -> None:
    async with scene() as run:
        await run.record(2)
        async with run.opened() as replica:
            await run.advance(replica)
            whole = await run.record()
            # The updates that this node found itself while no set was published.
            alone = GatherResult(window=whole.window, updates=whole.updates[:1], skipped={})
            await replica.gather()
            await run.stage.drive(replica.apply(alone))
            await replica.wait_for_save()
            assert not run.agrees(replica)
            await run.record()
            if killed:
                divergence = replica.window
                async with run.opened() as again:
                    assert again.window == divergence
                    await run.advance(again)
                    assert run.agrees(again)
            else:
                await run.advance(replica)
                assert run.agrees(replica)
            assert [event["window"] for event in run.events_of("rolled_back")] == [whole.window]


async def test_a_rollback_leaves_no_checkpoint_of_the_wrong_model_whose_save_had_not_ended(scene) -> None:
    """The save ends, and its checkpoint is due, when the rollback waits for it."""
    async with scene() as run:
        stage, written = run.stage, threading.Event()
        await run.record()
        async with stage.replica(stage.setup("validator"), run.leader) as elector:
            await stage.drive(elector.open(START))
            await run.advance(elector)
            whole = await run.record()
            save = elector.train_state.save

            def late(*args):
                written.wait(30)
                return save(*args)

            elector.train_state.save = late
            alone = GatherResult(window=whole.window, updates=whole.updates[:1], skipped={})
            await elector.gather()
            await stage.drive(elector.apply(alone))
            stage.server.faults.add("^PUT .*checkpoint-.*shard", Delay(1.0), times=2)
            advance = asyncio.create_task(run.advance(elector))
            await stage.until(lambda: stage.of("rolled_back", "validator"))
            await asyncio.sleep(0.1)
            written.set()
            await advance
            assert digest(elector.train_state.parameters) == digest(run.recording.train_state.parameters)
            await elector.wait_for_save()
            await stage.until(lambda: stage.of("checkpoint", "validator"))
        async with run.opened() as replica:
            assert replica.window == START + 2  # it has used the checkpoint


async def test_checkpoints_that_could_not_be_withdrawn_in_a_rollback_are_before_the_next_is_published(scene) -> None:
    """Otherwise the wrong one would stay: a checkpoint that is there is not replaced."""
    async with scene() as run:
        stage = run.stage
        await run.record()
        async with stage.replica(stage.setup("validator"), run.leader) as elector:
            await stage.drive(elector.open(START))
            await run.advance(elector)
            whole = await run.record()
            await elector.gather()
            await stage.drive(elector.apply(GatherResult(window=whole.window, updates=whole.updates[:1], skipped={})))
            await stage.until(lambda: stage.of("checkpoint", "validator"))
            bucket = stage.setup("validator").account.name
            stage.server.faults.add(f"^GET /{bucket}[?].*prefix=checkpoint", Status(403, "AccessDenied"), times=1)
            await run.advance(elector)
            assert stage.of("rolled_back", "validator")
            await stage.until(lambda: len(stage.of("checkpoint", "validator")) == 2)
        async with run.opened() as replica:
            assert replica.window == START + 2  # it has used the checkpoint


@pytest.mark.parametrize("where", ["aggregate", "elector"])
async def test_a_set_with_an_object_that_is_no_update_is_not_waited_for(scene, where: str, caplog) -> None:
    """Wherever that object is found: every node applies the updates that it finds itself."""
    async with scene() as run:
        garbage = bytes(run.recording.train_state.spec.expected_size)
        found = await run.record(included=False, aggregate=False, report=False)
        one, other = found.updates
        forged = GatheredUpdate(one.uid, None, hashlib.sha256(garbage).hexdigest(), len(garbage))
        included = included_set(GatherResult(window=START, updates=(forged, other), skipped={}), "1")
        leader = run.leader.comms
        await publish_decision([leader], included)
        if where == "aggregate":
            await leader.put_aggregate(included, assemble(included, [garbage, other.update.body]))
        else:
            await leader.put_witnessed(START, one.uid, garbage)
        async with run.opened() as replica:
            await asyncio.wait_for(run.advance(replica), 30)
        assert run.events_of("applied")[-1]["included"] == []  # no miner committed in time
        assert "the included set can't be applied; keeping this node's own set" in caplog.text


async def test_what_a_node_applied_before_a_checkpoint_is_not_compared_any_more(scene) -> None:
    """It comes back with a window whose set differs, and from which the checkpoint's model does not follow."""
    async with scene() as run:
        await run.record()
        async with run.opened() as replica:
            await run.advance(replica)
            whole = await run.record()
            await replica.gather()
            await run.stage.drive(
                replica.apply(GatherResult(window=whole.window, updates=whole.updates[:1], skipped={}))
            )
        await run.record(3)
        await run.recording.checkpoint()
        await run.record()
        async with run.opened() as replica:
            assert replica.window == START + 5
            await run.advance(replica)
            assert run.agrees(replica)
        assert run.events_of("rolled_back") == []
        assert [event["window"] for event in run.events_of("applied")] == [START, START + 1, START + 5]


async def test_without_a_wait_for_sets_a_node_applies_its_own_and_the_leaders_report_corrects_it(scene) -> None:
    async with scene(manifest_timeout_seconds=0) as run:
        await run.record()
        await run.stage.pass_windows(2, run.newcomer.clock)  # the leader's report describes past windows completely
        async with run.opened() as replica:
            await run.advance(replica)
            late = await run.record(report=False)
            await run.advance(replica)
            # Updates that this node finds itself do not count, because no miner committed to them in time.
            assert run.events_of("applied")[-1]["included"] == []
            assert not run.agrees(replica)
            await run.stage.drive(run.recording.report(late))
            await run.advance(replica)
            assert [event["window"] for event in run.events_of("rolled_back")] == [late.window]
            assert run.agrees(replica)


async def test_a_lost_window_is_reported_and_skipped_to_the_next_checkpoint(scene) -> None:
    async with scene(gradient_retention_windows=2) as run:
        await run.record(1, included=False, aggregate=False, report=False, updates=False)
        await run.record(4)
        async with run.opened() as replica:
            ahead = asyncio.create_task(run.advance(replica))
            await run.stage.until(lambda: run.events_of("problem"))
            assert f"window {START} " in run.events_of("problem")[0]["text"]
            assert replica.window == START
            await run.recording.checkpoint()
            await run.record()
            await ahead
            await run.advance(replica)
            assert run.agrees(replica)
        assert run.events_of("restored")[0]["window"] == START + 5
        assert [event["window"] for event in run.events_of("applied")] == [START + 5]


async def test_a_skipped_window_may_contain_the_update_that_was_sent_before_a_restart(scene) -> None:
    """So the error feedback, which contains it, too, is reset, as by a checkpoint that is loaded at the start."""
    async with scene(gradient_retention_windows=2) as run:
        await run.record()
        async with run.opened() as replica:
            outer = replica.train_state.outer
            work = {name: torch.randn(one.shape) for name, one in replica.train_state.parameters.items()}
            outer.pack(work, step=0, window=START, uid=3, pages_digest="0" * 64, batches=1)
            await run.advance(replica)
        await run.record(1, included=False, aggregate=False, report=False, updates=False)
        await run.record(2)
        async with run.opened() as replica:
            assert (replica.window, replica.train_state.outer.state_dict()["window"]) == (START + 1, START)
            ahead = asyncio.create_task(run.advance(replica))
            await run.stage.until(lambda: run.events_of("problem"))
            await run.recording.checkpoint()
            await run.record()
            await ahead
            assert run.events_of("restored")[0]["window"] == START + 4
            assert replica.train_state.outer.state_dict()["window"] is None


async def test_a_node_that_skips_windows_asks_no_more_for_their_updates(scene) -> None:
    """Those of the next windows, which no bucket gives, were prefetched; live, no later window replaces them."""
    async with scene(gradient_retention_windows=2) as run:
        await run.record(1, included=False, aggregate=False, report=False, updates=False)
        await run.record(4, aggregate=False)
        for name in ("miner-1", "miner-2"):
            bucket = run.stage.setup(name).account.name
            run.stage.server.faults.add(f"^(GET|HEAD) /{bucket}/gradient", Status(503, "SlowDown"), times=None)
        async with run.opened() as replica:
            ahead = asyncio.create_task(run.advance(replica))
            await run.stage.until(lambda: run.events_of("problem"))
            await run.recording.checkpoint()
            await run.record()
            await ahead
            assert run.events_of("restored")[0]["window"] == START + 5
            await run.stage.until(lambda: not [one for one in asyncio.all_tasks() if "WindowUpdates.of" in repr(one)])


async def test_windows_without_updates_are_no_steps_neither_from_the_start_nor_from_a_checkpoint(scene) -> None:
    async with scene() as run:
        await run.record(senders=0)
        await run.record()
        async with run.opened() as replica:
            await run.advance(replica)
            assert replica.train_state.global_step == 1
            await run.record(senders=0)
            await run.recording.checkpoint()
            await run.record(2)
            await run.advance(replica)
            assert replica.train_state.global_step == 3
            assert run.agrees(replica)
        shutil.rmtree(replica.folder)
        async with run.opened() as replica:
            assert (replica.window, replica.train_state.global_step) == (START + 3, 1)
            await run.advance(replica)
            assert run.agrees(replica)


@pytest.mark.parametrize("false", ["weights", "steps"])
async def test_a_checkpoint_that_is_not_the_leaders_model_is_refused_and_an_older_one_taken(
    scene, caplog, false
) -> None:
    async with scene() as run:
        await run.record(2)
        await run.recording.checkpoint()
        await run.record(2)
        train_state = run.recording.train_state
        weights, steps = (1.0, 0) if false == "weights" else (0.0, 1)
        with torch.no_grad():
            name = next(iter(run.recording.train_state.parameters))
            run.recording.train_state.parameters[name].add_(weights)
            train_state.global_step -= steps
            await run.recording.checkpoint()
            run.recording.train_state.parameters[name].sub_(weights)
            train_state.global_step += steps
        async with run.opened() as replica:
            assert "differs from the one that most electors report" in caplog.text
            assert replica.window == START + 2


async def test_no_more_checkpoints_of_an_elector_are_downloaded_than_an_honest_one_keeps(scene, caplog) -> None:
    """Each download is the whole model, and only after it the model turns out to be another one."""
    async with scene(checkpoints_kept=1) as run:
        leader, train_state = run.leader.comms, run.recording.train_state
        for _ in range(5):
            await run.record()
            with torch.no_grad():
                train_state.global_step -= 1
                saved = train_state.save(run.recording.window, {})
                train_state.global_step += 1
            await publish(leader.own_store, saved.folder, signer=leader.signer, keep_last=100)
        async with run.opened() as replica:
            assert replica.window == START
        refused = [one for one in caplog.messages if "differs from the one that most electors report" in one]
        assert [one.split()[3] for one in refused] == [str(START + 5), str(START + 4)]


async def test_a_checkpoint_of_weights_that_are_no_numbers_is_refused_and_an_older_one_taken(scene, caplog) -> None:
    async with scene() as run:
        await run.record(2)
        await run.recording.checkpoint()
        await run.record(2)
        name = next(iter(run.recording.train_state.parameters))
        parameter = run.recording.train_state.parameters[name]
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(float("nan"))
            await run.recording.checkpoint()
            parameter.copy_(kept)
        async with run.opened() as replica:
            assert f"{name} has entries that are not finite numbers" in caplog.text
            assert replica.window == START + 2


async def test_a_checkpoint_of_a_window_to_come_is_not_taken(scene) -> None:
    async with scene() as run:
        await run.record(2)
        run.recording.window += 100
        await run.recording.checkpoint()
        run.recording.window -= 100
        async with run.opened() as replica:
            assert replica.window == START


async def test_torn_state_leads_to_the_generation_before(scene, caplog) -> None:
    async with scene() as run:
        await run.record(2)
        async with run.opened() as replica:
            await run.advance(replica, START + 1)
            await run.advance(replica)
        newest = run.stage.folder("miner-3") / f"window-{START + 2}"
        shard = sorted(await asyncio.to_thread(lambda: [*newest.glob("shard-*")]))[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
        async with run.opened() as replica:
            assert replica.window == START + 1
            assert "saved state skipped" in caplog.text
            await run.advance(replica)
            assert run.agrees(replica)


async def test_what_is_a_nodes_own_survives_a_leap(scene) -> None:
    class Scores:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict:
            return {"value": self.value}

        def load_state_dict(self, state) -> None:
            self.value = state["value"]

    async with scene() as run:
        await run.record()
        async with run.replica() as replica:
            replica.register("scores", Scores(7))
            await run.stage.drive(replica.open(START))
            await run.advance(replica)
        await run.record(4)
        await run.recording.checkpoint()
        async with run.replica() as replica:
            scores = Scores(0)
            replica.register("scores", scores)
            await run.stage.drive(replica.open(START))
            assert (replica.window, scores.value) == (START + 5, 7)


async def test_a_new_version_begins_with_an_earlier_ones_weights(scene) -> None:
    async with scene() as run:
        await run.record(2)
        await run.recording.checkpoint()
        before = digest(run.recording.train_state.parameters)
        update = {"spec_version": 2, "checkpoint_init_version": run.stage.hparams.version}
        run.stage.hparams = run.stage.hparams.model_copy(update=update)
        newcomer = await run.stage.context(run.stage.setup("miner-3"))
        async with (
            run.stage.running(newcomer.clock.run()),
            run.stage.replica(run.stage.setup("miner-3"), newcomer) as replica,
        ):
            await run.stage.drive(newcomer.clock.wait_for_window(0))
            await run.stage.drive(replica.open(START + 9))
            assert (replica.window, replica.train_state.global_step) == (START + 9, 0)
            assert digest(replica.train_state.parameters) == before
            # An audit from the run's start does the same.
            hparams = run.stage.hparams
            reader = NetworkReader(None, None, None, hparams, newcomer.comms)
            audited = TrainState(build_model(hparams), hparams, run.stage.folder("audit"))
            audited.start_window = START + 9
            assert await run.stage.drive(load_state(reader, audited, "start", until=START + 9)) == START + 9
            assert digest(audited.parameters) == before
