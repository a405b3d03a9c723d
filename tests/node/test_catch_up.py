"""A node that joins late or was absent ends with the network's bytes: from updates, and over windows that are lost."""

import asyncio
import hashlib
import shutil

import pytest
import torch
from catching_up import START
from deciding import publish_decision
from included import included_set

from tplr.chain.ledger import Ledger
from tplr.exchange.aggregates import assemble
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.testing.s3server import Status
from tplr.training.model import build_model


async def test_without_sets_and_aggregates_the_leaders_report_says_what_to_apply(catch_up, monkeypatch) -> None:
    asked, real = [], WindowUpdates.of

    async def counted(self, window: int) -> GatherResult:
        asked.append(window)
        return await real(self, window)

    monkeypatch.setattr(WindowUpdates, "of", counted)
    async with catch_up() as run:
        await run.record(3, included=False, aggregate=False)
        await run.record()
        async with run.opened() as replica:
            await run.advance(replica)
            assert run.agrees(replica)
        assert asked == [START, START + 1, START + 2, START + 3]  # ahead of the applied window, and each once


async def test_what_the_last_leader_published_is_found_and_carried_over_by_the_next(catch_up) -> None:
    async with catch_up() as run:
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


async def test_a_node_with_states_of_another_run_of_later_windows_saves_and_resumes(catch_up) -> None:
    async with catch_up() as run:
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


@pytest.mark.parametrize("where", ["aggregate", "elector"])
async def test_a_set_with_an_object_that_is_no_update_is_not_waited_for(catch_up, where: str, caplog) -> None:
    """Wherever that object is found: every node applies the updates that it finds itself."""
    async with catch_up() as run:
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


async def test_a_lost_window_is_reported_and_skipped_to_the_next_checkpoint(catch_up) -> None:
    async with catch_up(gradient_retention_windows=2) as run:
        await run.record(1, included=False, aggregate=False, report=False, updates=False)
        await run.record(4)
        async with run.opened() as replica:
            assert replica.window == START
            await run.skip_lost(replica)
            assert f"window {START} " in run.events_of("problem")[0]["text"]
            await run.advance(replica)
            assert run.agrees(replica)
        assert run.events_of("restored")[0]["window"] == START + 5
        assert [event["window"] for event in run.events_of("applied")] == [START + 5]


async def test_a_skipped_window_may_contain_the_update_that_was_sent_before_a_restart(catch_up) -> None:
    """So the error feedback, which contains it, too, is reset, as by a checkpoint that is loaded at the start."""
    async with catch_up(gradient_retention_windows=2) as run:
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
            await run.skip_lost(replica)
            assert run.events_of("restored")[0]["window"] == START + 4
            assert replica.train_state.outer.state_dict()["window"] is None


@pytest.mark.long
async def test_a_node_that_skips_windows_asks_no_more_for_their_updates(catch_up) -> None:
    """Those of the next windows, which no bucket gives, were prefetched; live, no later window replaces them."""
    async with catch_up(gradient_retention_windows=2) as run:
        await run.record(1, included=False, aggregate=False, report=False, updates=False)
        await run.record(4, aggregate=False)
        for name in ("miner-1", "miner-2"):
            bucket = run.stage.setup(name).account.name
            run.stage.server.faults.add(f"^(GET|HEAD) /{bucket}/gradient", Status(503, "SlowDown"), times=None)
        async with run.opened() as replica:
            await run.skip_lost(replica)
            assert run.events_of("restored")[0]["window"] == START + 5
            await run.stage.until(lambda: not [one for one in asyncio.all_tasks() if "WindowUpdates.of" in repr(one)])


@pytest.mark.long
async def test_windows_without_updates_are_no_steps_neither_from_the_start_nor_from_a_checkpoint(catch_up) -> None:
    async with catch_up() as run:
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


async def test_torn_state_leads_to_the_generation_before(catch_up, caplog) -> None:
    async with catch_up() as run:
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
