"""A node that applied other updates than the network rolls back and applies the decided ones."""

import asyncio
import threading

import pytest
from catching_up import START

from tplr.testing.s3server import Delay, Status
from tplr.training.fingerprint import digest


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_rolls_back_when_the_set_came_late_and_differs(catch_up, killed: bool) -> None:
    async with catch_up() as run:
        await run.record(2)
        async with run.opened() as replica:
            await run.advance(replica)
            whole = await run.record()
            await run.apply_first(replica, whole)
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


@pytest.mark.long
async def test_a_rollback_leaves_no_checkpoint_of_the_wrong_model_whose_save_had_not_ended(catch_up) -> None:
    """The save ends, and its checkpoint is due, when the rollback waits for it."""
    async with catch_up() as run:
        stage, written = run.stage, threading.Event()
        await run.record()
        async with run.opened_elector() as elector:
            await run.advance(elector)
            whole = await run.record()
            save = elector.train_state.save

            def late(*args):
                written.wait(30)
                return save(*args)

            elector.train_state.save = late
            await run.apply_first(elector, whole)
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


@pytest.mark.long
async def test_checkpoints_that_could_not_be_withdrawn_in_a_rollback_are_before_the_next_is_published(catch_up) -> None:
    """Otherwise the wrong one would stay: a checkpoint that is there is not replaced."""
    async with catch_up() as run:
        stage = run.stage
        await run.record()
        async with run.opened_elector() as elector:
            await run.advance(elector)
            await run.apply_first(elector, await run.record())
            await stage.until(lambda: stage.of("checkpoint", "validator"))
            bucket = stage.setup("validator").account.name
            stage.server.faults.add(f"^GET /{bucket}[?].*prefix=checkpoint", Status(403, "AccessDenied"), times=1)
            await run.advance(elector)
            assert stage.of("rolled_back", "validator")
            await stage.until(lambda: len(stage.of("checkpoint", "validator")) == 2)
        async with run.opened() as replica:
            assert replica.window == START + 2  # it has used the checkpoint


async def test_what_a_node_applied_before_a_checkpoint_is_not_compared_any_more(catch_up) -> None:
    """It comes back with a window whose set differs, and from which the checkpoint's model does not follow."""
    async with catch_up() as run:
        await run.record()
        async with run.opened() as replica:
            await run.advance(replica)
            await run.apply_first(replica, await run.record())
        await run.record(3)
        await run.recording.checkpoint()
        await run.record()
        async with run.opened() as replica:
            assert replica.window == START + 5
            await run.advance(replica)
            assert run.agrees(replica)
        assert run.events_of("rolled_back") == []
        assert [event["window"] for event in run.events_of("applied")] == [START, START + 1, START + 5]


async def test_without_a_wait_for_sets_a_node_applies_its_own_and_the_leaders_report_corrects_it(catch_up) -> None:
    async with catch_up(manifest_timeout_seconds=0) as run:
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


async def test_a_publishing_that_is_cancelled_before_it_begins_holds_no_snapshot(catch_up) -> None:
    """The save ends, and its checkpoint is due, right when the rollback looks for both."""
    async with catch_up(checkpoint_frequency=1) as run:
        await run.record()
        async with run.opened_elector() as elector:
            await run.advance(elector)
            await elector.wait_for_save()
            await elector._publishing
            saved, held = elector.train_state.saved(), elector.train_state.snapshots.held

            async def ended():
                return saved

            saving = asyncio.create_task(elector._save(elector.window, ended()))
            await asyncio.sleep(0)
            assert (saving.done(), held) == (True, {elector.window})
            await elector._stop_saving()
            assert held == set()
