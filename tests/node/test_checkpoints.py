"""A node starts from the newest checkpoint of an elector that is the model of the run."""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from catching_up import START

from tplr.chain.ledger import Ledger
from tplr.comms.checkpoints import CheckpointExchange
from tplr.errors import ConfigError, StateError
from tplr.exchange.checkpoints import Checkpoint, fetch_manifest, publish
from tplr.exchange.snapshot import MANIFEST, SnapshotManifest, write_manifest
from tplr.hparams import load_hparams
from tplr.keys import checkpoint_prefix
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import load_state, reading_state
from tplr.seeds import fingerprint_seed
from tplr.training.fingerprint import digest


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
async def test_joins_from_a_checkpoint_and_aggregates_when_the_updates_are_gone(
    catch_up, scheme, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("tplr.node.replica.LOG_INTERVAL", 0.0)
    caplog.set_level("INFO")
    async with catch_up(scheme) as run:
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


async def test_only_electors_publish_checkpoints_and_who_lost_everything_finds_theirs(catch_up) -> None:
    async with catch_up() as run:
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
        async with run.opened_elector() as elector:
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


class Scores:
    """A part of a node's state that is its own."""

    def __init__(self, evidence: str = "") -> None:
        self.evidence = evidence

    def state_dict(self) -> dict[str, str]:
        return {"evidence": self.evidence}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.evidence = state["evidence"]


async def test_a_checkpoint_contains_nothing_of_the_electors_own_records(catch_up) -> None:
    """They may be sealed, and would make its manifest larger than others accept."""
    async with catch_up() as run:
        stage, evidence = run.stage, "sealed" * 300_000  # as much as on a full subnet
        await run.record(2)
        async with run.opened_elector(scores=Scores(evidence)) as elector:
            await run.advance(elector)
            await stage.until(lambda: stage.of("checkpoint", "validator"))
            checkpoint = (await run.newcomer.comms.checkpoints())[0]
            assert "sealed" not in str((await fetch_manifest(checkpoint)).values)
        async with run.opened() as replica:
            assert replica.window == START + 2  # it has used the checkpoint
        # On the elector's disk they are.
        scores = Scores()
        async with run.opened_elector(scores=scores) as elector:
            assert (elector.window, scores.evidence) == (START + 2, evidence)


async def test_what_is_a_nodes_own_survives_a_leap(catch_up) -> None:
    async with catch_up() as run:
        await run.record()
        async with run.opened(scores=Scores("seven")) as replica:
            await run.advance(replica)
        await run.record(4)
        await run.recording.checkpoint()
        scores = Scores()
        async with run.opened(scores=scores) as replica:
            assert (replica.window, scores.evidence) == (START + 5, "seven")


@pytest.mark.parametrize("false", ["weights", "steps"])
async def test_a_checkpoint_that_is_not_the_leaders_model_is_refused_and_an_older_one_taken(
    catch_up, caplog, false
) -> None:
    async with catch_up() as run:
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
            assert "differ from those that most electors report" in caplog.text
            assert replica.window == START + 2


async def test_no_more_checkpoints_of_an_elector_are_downloaded_than_an_honest_one_keeps(catch_up, caplog) -> None:
    """Each download is the whole model, and only after it the model turns out to be another one."""
    async with catch_up(checkpoints_kept=1) as run:
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
            await run.stage.drive(replica.open(START))  # as in each window in which the node waits for a checkpoint
        refused = [one for one in caplog.messages if "differ from those that most electors report" in one]
        assert [one.split()[3] for one in refused] == [str(START + 4), str(START + 2)]


async def test_the_same_shards_as_of_another_run_are_no_copy_of_an_honest_checkpoint(catch_up, monkeypatch) -> None:
    async with catch_up() as run:
        await run.record(2)
        leader, others = run.leader.comms, [one.comms for one in run.miners]
        saved = run.recording.train_state.save(run.recording.window, {})
        for comms in others:
            await comms.copy_run(run.stage.hparams.start_horizon_windows)
            seen = await leader.get_report(leader.uid, run.recording.window - 1)
            await comms.put_report(seen.model_copy(update={"uid": comms.uid}))
            await comms.publish_checkpoint(saved.folder)
        values = saved.manifest.values | {"run": {}}
        write_manifest(saved.folder, saved.manifest.model_copy(update={"values": values}))
        await leader.publish_checkpoint(saved.folder)
        with contextlib.closing(Ledger(run.stage.network.chain, clock=run.stage.clock)) as admin:
            for comms in others:
                admin.set_stake(comms.hotkey, 0.9 * leader.metagraph.neurons[leader.uid].stake)
                admin.set_permit(comms.hotkey)
        await run.stage.pass_windows(1, run.newcomer.clock)
        await run.newcomer.comms.refresh()
        assert len(run.newcomer.comms.electors.uids) == 3
        asked: list[str] = []
        take = run.stage.server.faults.take
        monkeypatch.setattr(
            run.stage.server.faults, "take", lambda method, target: asked.append(target) or take(method, target)
        )
        async with run.opened() as replica:
            assert replica.window == START + 2
        # An author can replace its manifest: what was compared is what is used.
        places = [checkpoint_prefix(START + 2, comms.uid, "1") + MANIFEST for comms in others]
        assert [sum(one in target for target in asked) for one in places] == [1, 1]


async def test_who_has_published_a_false_checkpoint_is_asked_last_from_then_on(catch_up, caplog) -> None:
    async with catch_up() as run:
        train_state = run.recording.train_state
        await run.record(2)
        await run.newcomer.comms.publish_checkpoint(train_state.save(run.recording.window, {}).folder)
        await run.record(2)
        train_state.global_step -= 1
        await run.recording.checkpoint()
        async with run.opened() as replica:
            await run.stage.drive(replica.open(START))
            assert replica.window == START + 2
        assert caplog.text.count("differ from those that most electors report") == 1


async def test_a_checkpoint_of_weights_that_are_no_numbers_is_refused_and_an_older_one_taken(catch_up, caplog) -> None:
    async with catch_up() as run:
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


async def test_a_checkpoint_with_false_outer_state_is_refused_and_an_older_one_taken(catch_up, caplog) -> None:
    """Its weights are right, but the next windows would give others."""
    async with catch_up("sparseloco") as run:
        await run.record(2)
        await run.recording.checkpoint()
        await run.record(2)
        outer = run.recording.train_state.outer
        kept = {name: one.clone() for name, one in outer.shared.items()}
        name = next(one for one in kept if one.startswith("shared.caps."))
        outer.shared[name].mul_(4)
        await run.recording.checkpoint()
        outer.load_shared(kept)
        async with run.opened() as replica:
            assert "its fingerprints differ from those that most electors report" in caplog.text
            assert replica.window == START + 2
            await run.advance(replica)
            assert run.agrees(replica)
        # A reader that starts from it says so, instead of accusing later reports.
        reader = NetworkReader(None, None, None, run.stage.hparams, run.newcomer.comms)
        state = reading_state(reader, "checkpoint", START, run.stage.folder("scratch"))
        with pytest.raises(StateError, match=f"checkpoint of window {START + 4} by uid 0: .* outer fingerprint is"):
            await run.stage.drive(load_state(reader, state, "checkpoint", until=run.recording.window))


@pytest.mark.parametrize(("false", "found"), [("model", "its digest differs"), ("momentum", "its fingerprints differ")])
async def test_a_checkpoint_that_is_right_only_where_fingerprints_look_is_refused(
    catch_up, caplog, false, found
) -> None:
    """They hash few entries, and who publishes it after the window knows which."""
    constants = load_hparams(Path(__file__).parents[2] / "hparams-sparseloco.json").sparseloco
    assert constants
    constants = constants.model_copy(update={"outer_momentum": 0.5})
    async with catch_up("sparseloco", sparseloco=constants, digest_interval_windows=100) as run:
        await run.record(2)
        await run.recording.checkpoint()
        await run.record(2)
        train_state, window = run.recording.train_state, run.recording.window
        seed = fingerprint_seed(window=window - 1, block_hash=await run.leader.comms.window_hash(window))
        tensors = train_state.parameters if false == "model" else train_state.outer.shared
        tensor = next(one for one in tensors.values() if one.numel() > 1000)
        before = train_state.fingerprint(seed), train_state.outer_fingerprint(seed)
        with torch.no_grad():
            for entry in tensor.detach().view(-1)[:100].split(1):
                kept = entry.clone()
                entry.add_(1.0)
                if (train_state.fingerprint(seed), train_state.outer_fingerprint(seed)) == before:
                    break  # most entries are not hashed
                entry.copy_(kept)
            await run.recording.checkpoint()
            entry.copy_(kept)
        async with run.opened() as replica:
            assert f"{found} from " in caplog.text
            assert replica.window == START + 2
            await run.advance(replica)
            assert run.agrees(replica)


async def test_a_checkpoint_that_no_digest_confirms_is_not_downloaded(catch_up, caplog, monkeypatch) -> None:
    """Honest electors publish one only where reports have a digest; others may claim newer windows to come first."""
    fetched: list[int] = []
    fetch = CheckpointExchange.fetch_checkpoint

    async def noted(self: CheckpointExchange, checkpoint: Checkpoint, *args: Any) -> SnapshotManifest:
        fetched.append(checkpoint.window)
        return await fetch(self, checkpoint, *args)

    monkeypatch.setattr(CheckpointExchange, "fetch_checkpoint", noted)
    async with catch_up(digest_interval_windows=100) as run:
        await run.record(3)
        await run.recording.checkpoint()
        async with run.opened() as replica:
            assert "most electors report no digest of the model of that window" in caplog.text
            assert replica.window == START
        # Nor one whose manifest can't be that of the run.
        await run.record()
        run.recording.train_state.global_step += 10
        await run.recording.checkpoint()
        async with run.opened() as replica:
            assert "14 steps in 4 windows" in caplog.text
            assert replica.window == START
    assert fetched == []


async def test_a_checkpoint_of_a_window_in_which_none_is_due_comes_last(catch_up) -> None:
    async with catch_up(digest_interval_windows=1) as run:
        await run.record(2)
        await run.recording.checkpoint()
        await run.record()
        await run.recording.checkpoint()
        async with run.opened() as replica:
            assert replica.window == START + 2


async def test_a_checkpoint_of_a_window_to_come_is_not_taken(catch_up) -> None:
    async with catch_up() as run:
        await run.record(2)
        run.recording.window += 100
        await run.recording.checkpoint()
        run.recording.window -= 100
        async with run.opened() as replica:
            assert replica.window == START
