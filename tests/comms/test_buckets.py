"""A node's own buckets, and the deletion of old objects from them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from three_nodes import ALICE, BOB, W, World

from tplr.clock import Tick
from tplr.keys import commit_key, debug_key, gradient_key, state_key
from tplr.localnet.accounts import bucket_variables
from tplr.testing.s3server import Status


async def test_old_objects_go_from_the_bucket(world: World) -> None:
    alice = world[ALICE]
    for window in (1, 2, W):
        await alice.own_store.put(gradient_key(window, ALICE, "1"), b"x")
        await alice.own_store.put(commit_key(window, ALICE, "1"), b"")
    for window in range(5):
        await alice.put({}, ALICE, window, "checkpoint", local=False, stale_retention=99)
    await alice.cleanup_s3_data(ALICE, W, 8)
    await alice.cleanup_old_checkpoints(keep_last=2)
    kept = {make(window, ALICE, "1") for make in (gradient_key, commit_key) for window in (2, W)}
    assert set(await world.keys(ALICE)) == kept | {state_key("checkpoint", window, ALICE, "1") for window in (3, 4)}


async def test_clean_up_runs_with_the_windows(world: World) -> None:
    alice = world[ALICE]
    window = alice.block_to_window(await alice.chain.head())
    await alice.own_store.put(gradient_key(window, ALICE, "1"), b"x")

    async def gone() -> None:
        while await world.keys(ALICE):  # noqa: ASYNC110 - a bucket tells nobody what changes in it
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(alice.clock.run()), group.create_task(alice.run_cleanup())]
        await alice.clock.wait_for_window(window)
        assert await world.keys(ALICE)
        # A failed clean-up has no effect: the next window has another one.
        world.server.faults.add("^DELETE ", Status(403, "AccessDenied"), times=1)
        async with asyncio.timeout(20):
            await world.clock.drive(gone(), step=12.0)
        for loop in loops:
            loop.cancel()


async def test_reports_stay_as_long_as_the_checkpoints_that_they_confirm(world: World, monkeypatch) -> None:
    """A checkpoint is taken only with most electors' reports of its model, and decisions of that age are kept, too."""
    alice = world[ALICE]
    changes = {"gradient_retention_windows": 2, "checkpoint_frequency": 3, "checkpoints_kept": 1}
    monkeypatch.setattr(alice, "_hparams", alice._hparams.model_copy(update=changes))
    await world.pass_window()
    for window in (W - 6, W - 5, W):
        for make in (gradient_key, debug_key):
            await alice.own_store.put(make(window, ALICE, "1"), b"x")

    async def ticks() -> AsyncIterator[Tick]:
        yield Tick(W + 1, 0)

    monkeypatch.setattr(alice.clock, "ticks", ticks)
    await alice.run_cleanup()
    reports = {debug_key(window, ALICE, "1") for window in (W - 5, W)}
    assert set(await world.keys(ALICE)) == reports | {gradient_key(W, ALICE, "1")}


async def test_own_buckets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    account = world.accounts[ALICE]
    for name, value in bucket_variables("gradients", account, "read", "write").items():
        monkeypatch.setenv(name, value)
    assert world[ALICE].get_own_bucket("gradients", "write") == account.writable
    assert world[ALICE].get_own_bucket("gradients") == world[BOB].get_bucket(ALICE) == account.readable
