"""The embedded chain in virtual time: every rule of the real chain that nodes may meet."""

import asyncio
import dataclasses
import re
import sqlite3
from contextlib import aclosing
from functools import partial
from itertools import pairwise

import pytest

from tplr.chain.clocks import ManualClock
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.chain.rules import ChainLimits
from tplr.errors import ChainUnavailable, ConfigError, NotPermitted, NotRegistered, RateLimited, Rejected


def open_chain(world, hotkey="miner", **settings):
    return LocalChain(world.path, hotkey, clock=world.clock, **settings)


async def act(world, awaitable):
    return await world.clock.drive(awaitable)


# Time


async def test_a_block_is_unknown_until_its_time_and_then_never_changes(world):
    async with open_chain(world) as chain, open_chain(world, "other") as other:
        with pytest.raises(ChainUnavailable, match="no block 1") as refused:
            await chain.block(1)
        assert refused.value.name == "UnknownBlock"
        world.pass_blocks(3)
        seen = [await chain.block(number) for number in range(4)]
        assert seen == [await other.block(number) for number in range(4)]
        assert len({block.hash for block in seen}) == 4
        assert all(re.fullmatch("0x[0-9a-f]{64}", block.hash) for block in seen)


async def test_two_chains_of_one_seed_have_other_hashes(make_world):
    one, two = make_world(seed=5), make_world(seed=5)
    assert one.pass_blocks(1) == two.pass_blocks(1) == 1
    assert one.admin.block(1).time == two.admin.block(1).time
    assert one.admin.block(1).hash != two.admin.block(1).hash


async def test_timestamps_increase_by_milliseconds_and_slots_are_skipped(make_world):
    world = make_world(skipped_slots=0.2)
    head = world.pass_blocks(200)
    times = [world.admin.block(number).time for number in range(head + 1)]
    assert times[0] == 0.0
    gaps = [after - before for before, after in pairwise(times[1:])]
    assert all(gap > 0 for gap in gaps)
    assert any(gap > 20 for gap in gaps), "no slot was skipped"
    assert sum(gap < 13 for gap in gaps) > 100
    assert all(round(time * 1000) / 1000 == time for time in times)


async def test_many_blocks_due_at_once_are_all_made(world):
    world.clock.advance(12 * 5000)
    head, due = world.admin.look()
    assert 4700 < head <= 5000
    assert due > world.clock.now()


async def test_a_chain_that_nobody_looked_at_stood_still(world, monkeypatch):
    monkeypatch.setattr("tplr.chain.blocks.MAX_CATCH_UP_SLOTS", 100)
    head = world.pass_blocks(3)
    before = world.admin.block(head).time
    world.clock.advance(10 * 365 * 86400)
    head, due = world.admin.look()
    assert 80 < head <= 103
    assert world.clock.now() < due < world.clock.now() + 60
    assert world.admin.block(4).time > before + 9 * 365 * 86400
    assert world.clock.now() - world.admin.block(head).time < 60


async def test_blocks_come_once_each_in_order_without_gaps(world):
    world.pass_blocks(4)
    async with open_chain(world) as chain, aclosing(chain.blocks()) as blocks:
        assert await anext(blocks) == 4
        world.pass_blocks(3)
        assert [await anext(blocks) for _ in range(3)] == [5, 6, 7]
        assert await act(world, anext(blocks)) == 8


async def test_the_head_steps_back_at_times_and_the_stream_never_does(make_world):
    world = make_world(stale_heads=0.3)
    world.pass_blocks(5)
    async with open_chain(world) as chain, aclosing(chain.blocks()) as blocks:
        heads = [await chain.head() for _ in range(30)]
        assert set(heads) == {4, 5}
        assert (4, 5) in set(pairwise(heads))
        assert (5, 4) in set(pairwise(heads))
        assert await anext(blocks) == 5
        world.pass_blocks(2)
        assert [await anext(blocks) for _ in range(2)] == [6, 7]
    fresh = make_world(stale_heads=0.9)
    async with open_chain(fresh) as chain:
        assert {await chain.head() for _ in range(10)} == {0}


async def test_a_block_becomes_final_only_behind_the_head(make_world):
    world = make_world(finality_lag=2)
    world.pass_blocks(5)
    async with open_chain(world) as chain:
        assert (await chain.block(3)).number == 3
        with pytest.raises(ChainUnavailable) as refused:
            await chain.block(4)
        assert refused.value.name == "NotFinal"


async def test_old_state_is_kept_by_archives_only(make_world):
    world = make_world(retained_blocks=10)
    world.join("miner")
    world.pass_blocks(20)
    async with open_chain(world) as chain, open_chain(world, archive=True) as archive:
        commitments = partial(chain.commitments, ["miner"])
        for read in (chain.block, chain.metagraph, commitments, chain.weights):
            with pytest.raises(ChainUnavailable) as refused:
                await read(5)
            assert refused.value.name == "StateDiscarded"
        assert (await archive.block(5)).number == 5
        assert (await archive.metagraph(0)).neurons == ()
        assert (await archive.metagraph(5)).uid_of("miner") == 0
        assert (await chain.metagraph(15)).uid_of("miner") == 0


# Writes


async def test_a_write_takes_effect_in_a_later_block_only(world):
    world.join("miner")
    async with open_chain(world) as chain:
        before = await chain.head()
        writing = asyncio.create_task(chain.commit("hello"))
        await asyncio.sleep(0.05)
        assert not writing.done()
        assert await chain.commitments(["miner"]) == {}
        block = await act(world, writing)
        assert block == before + 1
        found = (await chain.commitments(["miner"]))["miner"]
        assert (found.data, found.block) == ("hello", block)
        assert await chain.commitments(["miner"], before) == {}


async def test_writes_of_one_hotkey_go_one_after_the_other(world):
    world.join("miner")
    async with open_chain(world) as chain:
        blocks = await act(world, asyncio.gather(*(chain.commit(text) for text in "abc")))
        assert len(set(blocks)) == 3
        assert (await chain.commitments(["miner"]))["miner"].data == "c"


async def test_a_cancelled_write_may_land_all_the_same(world):
    world.join("miner")
    async with open_chain(world) as chain:
        writing = asyncio.create_task(chain.commit("hello"))
        await asyncio.sleep(0.05)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        world.pass_blocks(1)
        assert (await chain.commitments(["miner"]))["miner"].data == "hello"


# Commitments


async def test_commitments_need_registration_and_fail_in_a_block(world):
    async with open_chain(world, "stranger") as chain:
        before = await chain.head()
        with pytest.raises(NotRegistered) as refused:
            await act(world, chain.commit("x"))
        assert refused.value.name == "AccountNotAllowedCommit"
        assert await chain.head() > before


async def test_commitments_hold_128_bytes_not_characters(world):
    world.join("miner")
    async with open_chain(world) as chain:
        await act(world, chain.commit("a" * 128))
        with pytest.raises(Rejected, match="129"):
            await chain.commit("é" * 64 + "a")


async def test_the_quota_of_commitments_is_24_per_epoch(make_world):
    world = make_world(limits=ChainLimits())
    world.join("miner", "other")
    async with open_chain(world) as chain:
        for n in range(24):
            await act(world, chain.commit(f"{n:0128}"))
        with pytest.raises(RateLimited) as refused:
            await act(world, chain.commit("a" * 128))
        assert refused.value.name == "SpaceLimitExceeded"
        retry_at = refused.value.retry_at
        assert retry_at == 359  # netuid 1 and tempo 360: (359 + 1 + 1) % 361 == 0
        assert (await chain.commitments(["miner"]))["miner"].data == f"{23:0128}"
        world.pass_blocks(retry_at - await chain.head() - 1)
        assert await act(world, chain.commit("a" * 128)) >= retry_at


async def test_a_commitment_outlives_its_registration(world):
    world.join("miner")
    async with open_chain(world) as chain:
        await act(world, chain.commit("mine"))
        world.admin.deregister("miner")
        world.pass_blocks(1)
        assert (await chain.metagraph()).uid_of("miner") is None
        assert (await chain.commitments(["miner"]))["miner"].data == "mine"
        with pytest.raises(NotRegistered):
            await act(world, chain.commit("again"))


async def test_what_is_committed_is_readable_by_everyone(world):
    world.join("miner")
    async with open_chain(world) as chain, open_chain(world, "stranger") as stranger:
        await act(world, chain.commit("secret?"))
        assert (await stranger.commitments(["miner"]))["miner"].data == "secret?"


# Registration


async def test_uids_are_given_in_order_and_then_replaced(make_world):
    world = make_world(limits=ChainLimits(max_uids=3, immunity_period=10, commit_reveal=False, min_allowed_weights=1))
    world.join("a")
    world.pass_blocks(2)
    world.join("b", "c", stake=2000.0, permit=True)
    world.pass_blocks(8)
    # "a" is the only one whose immunity is over.
    assert world.admin.register("d") == 0
    joined = world.pass_blocks(1)
    neurons = world.admin.metagraph().neurons
    assert [neuron.hotkey for neuron in neurons] == ["d", "b", "c"]
    assert neurons[0].last_update == joined
    world.pass_blocks(3)
    # "b" and "c" are past it now, "d" is not; "b" is the earliest. Its permit goes with it.
    assert world.admin.register("e") == 1
    world.pass_blocks(1)
    neurons = world.admin.metagraph().neurons
    assert [(neuron.hotkey, neuron.permit) for neuron in neurons] == [("d", False), ("e", False), ("c", True)]
    with pytest.raises(Rejected, match="HotKeyAlreadyRegisteredInSubNet"):
        world.admin.register("c")


async def test_a_replaced_validator_that_comes_back_has_no_weights(world):
    world.join("v", stake=100.0, permit=True)
    world.pass_blocks(5)
    async with open_chain(world, "v") as chain:
        await act(world, chain.set_weights({0: 1.0}))
        assert await chain.weights() == {0: {0: 1.0}}
        world.admin.deregister("v")
        world.pass_blocks(1)
        assert await chain.weights() == {}
        world.join("v")
        assert (await chain.metagraph()).uid_of("v") == 0
        assert await chain.weights() == {}


async def test_stake_and_permit_are_apart_until_an_epoch_decides(world):
    world.join("rich", "poor")
    world.admin.set_stake("rich", 50.5)
    world.admin.set_permit("poor")
    world.pass_blocks(1)
    rich, poor = world.admin.metagraph().neurons
    assert (rich.stake, rich.permit, poor.stake, poor.permit) == (50.5, False, 0.0, True)
    world.pass_blocks(21)
    rich, poor = world.admin.metagraph().neurons
    assert (rich.permit, poor.permit) == (True, False)


async def test_reads_of_a_block_do_not_change_afterwards(world):
    world.join("a", stake=20.0)
    at = world.pass_blocks(1)
    before = world.admin.metagraph(at)
    world.admin.set_stake("a", 30.0)
    world.admin.register("b")
    assert world.admin.metagraph() == before
    world.pass_blocks(1)
    assert world.admin.metagraph(at) == before
    assert [neuron.stake for neuron in world.admin.metagraph().neurons] == [30.0, 0.0]


# Weights


async def test_weights_are_read_back_as_fractions(world):
    world.join("v", "m1", "m2", stake=100.0, permit=True)
    world.pass_blocks(5)
    async with open_chain(world, "v") as chain:
        block = await act(world, chain.set_weights({1: 3.0, 2: 1.0, 0: 0.0}))
        (row,) = (await chain.weights()).values()
        assert row == pytest.approx({1: 0.75, 2: 0.25}, abs=1e-5)
        assert sum(row.values()) == pytest.approx(1.0)
        assert (await chain.metagraph()).neurons[0].last_update == block
        assert await chain.weights(block - 1) == {}


async def test_weights_are_rate_limited_from_registration_on(world):
    world.join("v", stake=100.0, permit=True)
    async with open_chain(world, "v") as chain:
        joined = (await chain.metagraph()).neurons[0].last_update
        with pytest.raises(RateLimited) as refused:
            await chain.set_weights({0: 1.0})  # refused in the pool: no block passes
        assert (refused.value.name, refused.value.retry_at) == ("RateLimitExceeded", joined + 5)
        world.pass_blocks(5)
        block = await act(world, chain.set_weights({0: 1.0}))
        with pytest.raises(RateLimited) as refused:
            await chain.set_weights({0: 1.0})
        assert refused.value.retry_at == block + 5


@pytest.mark.parametrize(
    ("weights", "error", "name"),
    [
        ({7: 1.0}, Rejected, "UidVecContainInvalidOne"),
        ({0: 0.0, 1: 0.0}, Rejected, "WeightVecAllZero"),
        ({}, Rejected, "WeightVecAllZero"),
        ({0: float("nan")}, Rejected, "InvalidWeight"),
        ({0: -1.0}, Rejected, "InvalidWeight"),
        ({-1: 1.0}, Rejected, "UidVecContainInvalidOne"),
        ({1: 1.0}, Rejected, "WeightVecLengthIsLow"),
    ],
)
async def test_wrong_weights_are_rejected(make_world, weights, error, name):
    world = make_world(limits=ChainLimits(commit_reveal=False, weights_rate_limit=0, min_stake=10.0))
    world.join("v", "m", stake=100.0, permit=True)
    async with open_chain(world, "v") as chain:
        with pytest.raises(error) as refused:
            await act(world, chain.set_weights(weights))
        assert refused.value.name == name
        assert await chain.weights() == {}


async def test_weights_need_a_permit_stake_and_a_uid(world):
    world.join("poor", "unpermitted")
    world.admin.set_stake("unpermitted", 100.0)
    world.pass_blocks(6)
    for hotkey, error, name in [
        ("poor", NotPermitted, "StakeAmountTooLow"),
        ("unpermitted", NotPermitted, "NeuronNoValidatorPermit"),
        ("stranger", NotRegistered, "HotKeyNotRegisteredInSubNet"),
    ]:
        async with open_chain(world, hotkey) as chain:
            with pytest.raises(error) as refused:
                await act(world, chain.set_weights({0: 1.0}))
            assert refused.value.name == name
    async with open_chain(world, "unpermitted") as chain:
        await act(world, chain.set_weights({1: 1.0}))  # weight only on oneself needs no permit
        assert await chain.weights() == {1: {1: 1.0}}


async def test_sealed_weights_come_into_force_an_epoch_later(make_world):
    limits = ChainLimits(tempo=20, min_stake=10.0, min_allowed_weights=1, weights_rate_limit=2, max_unrevealed=2)
    world = make_world(limits=limits)
    world.join("v", stake=100.0, permit=True)
    world.pass_blocks(20)
    async with open_chain(world, "v") as chain:
        block = await act(world, chain.set_weights({0: 1.0}))
        assert block < 39
        assert await chain.weights() == {}
        with pytest.raises(RateLimited) as refused:
            await act(world, chain.set_weights({0: 1.0}))
        assert refused.value.name == "CommittingWeightsTooFast"
        world.pass_blocks(2)
        await act(world, chain.set_weights({0: 1.0}))
        world.pass_blocks(2)
        with pytest.raises(RateLimited) as refused:
            await act(world, chain.set_weights({0: 1.0}))
        assert refused.value.name == "TooManyUnrevealedCommits"
        # Netuid 1, tempo 20: epochs start at 19, 40, 61.
        head = await chain.head()
        world.pass_blocks(40 - head - 1)
        assert await chain.weights() == {}
        world.pass_blocks(1)
        assert await chain.weights() == {0: {0: 1.0}}


async def test_an_epoch_turns_weights_into_incentive(world):
    world.join("v", "w", "m1", "m2")
    world.admin.set_stake("v", 300.0)
    world.admin.set_stake("w", 100.0)
    world.pass_blocks(21)
    async with open_chain(world, "v") as one, open_chain(world, "w") as two:
        await act(world, asyncio.gather(one.set_weights({2: 1.0}), two.set_weights({3: 1.0})))
        assert all(neuron.incentive == 0.0 for neuron in (await one.metagraph()).neurons)
        world.pass_blocks(21)
        assert [neuron.incentive for neuron in (await one.metagraph()).neurons] == [0.0, 0.0, 0.75, 0.25]


async def test_limits_can_be_changed(world):
    world.join("v", stake=100.0, permit=True)
    world.admin.set_limits(weights_rate_limit=0)
    world.pass_blocks(1)
    assert world.admin.limits() == dataclasses.replace(world.admin.limits(0), weights_rate_limit=0)
    async with open_chain(world, "v") as chain:
        await act(world, chain.set_weights({0: 1.0}))
    with pytest.raises(TypeError):
        world.admin.set_limits(no_such_limit=1)


# The file


async def test_a_missing_file_and_a_wrong_subnet_are_said(world, tmp_path):
    with pytest.raises(ChainUnavailable, match="no chain file at"):
        LocalChain(tmp_path / "none.db", "miner")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "notes.txt").write_text("no database\n" * 100)
    with pytest.raises(ChainUnavailable, match=r"notes\.txt: file is not a database"):
        LocalChain(tmp_path / "notes.txt", "miner")
    with pytest.raises(ConfigError, match="holds subnet 1, not 3"):
        LocalChain(world.path, "miner", netuid=3)


def test_a_chain_is_never_made_over_another(world):
    before = world.admin.block(0)
    with pytest.raises(FileExistsError):
        Ledger.create(world.path, clock=ManualClock())
    assert world.admin.block(0) == before
    assert list(world.path.parent.glob("*.new*")) == []


async def test_a_busy_file_is_unavailable_and_the_stream_goes_on(world, monkeypatch):
    monkeypatch.setattr("tplr.chain.blocks.BUSY_TIMEOUT", 0.0)
    async with open_chain(world) as chain, aclosing(chain.blocks()) as blocks:
        assert await anext(blocks) == 0
        other = sqlite3.connect(world.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        world.clock.advance(24)
        with pytest.raises(ChainUnavailable, match="locked"):
            await chain.head()
        following = asyncio.create_task(anext(blocks))
        await asyncio.sleep(0.05)
        other.execute("ROLLBACK")
        other.close()
        assert await act(world, following) == 1


async def test_close_is_idempotent(world):
    chain = open_chain(world)
    await chain.close()
    await chain.close()
