"""A node's view of the chain, and writes with an unknown result."""

import asyncio
import dataclasses
import logging
import re

import pytest
from faulty import FaultyChain

from tplr.chain import ChainManager
from tplr.chain.commitment import encode_commitment
from tplr.chain.local import LocalChain
from tplr.errors import ChainUnavailable, NotPermitted, NotRegistered, RateLimited
from tplr.schemas import Bucket, UploadBounds
from tplr.seeds import derive


def bucket(digit):
    account = digit * 32
    return Bucket(name=account, account_id=account, access_key_id=digit * 32, secret_access_key=digit * 64)


@pytest.fixture
async def node(world):
    """Manager of hotkey ``me`` (uid 0) on a chain in virtual time, three blocks a window."""
    world.join("me")
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        yield ChainManager(FaultyChain(chain), blocks_per_window=3, retry_interval=0.005, fetch_interval=0.01)


async def commit_as(world, hotkey, text):
    async with LocalChain(world.path, hotkey, clock=world.clock) as chain:
        await world.clock.drive(chain.commit(text))


async def test_nothing_is_asked_before_refresh(node):
    assert (node.hotkey, node.commitments) == ("me", {})
    assert node.chain.calls == []
    for read in (lambda: node.metagraph, lambda: node.uid, lambda: node.get_hotkey(0)):
        with pytest.raises(ChainUnavailable, match="refresh"):
            read()


async def test_refresh_joins_buckets_by_hotkey_and_skips_garbage(world, node, caplog):
    world.join("good", "garbage", "silent")
    await commit_as(world, "good", encode_commitment(bucket("a")))
    await commit_as(world, "garbage", "127.0.0.1:80/".ljust(128, "0"))
    with caplog.at_level(logging.WARNING):
        await node.refresh()
        await node.refresh()
    assert node.uid == 0
    assert node.get_all_buckets() == node.commitments == {1: bucket("a")}
    assert (node.get_bucket(1), node.get_bucket(2), node.get_bucket(9)) == (bucket("a"), None, None)
    assert (node.get_hotkey(1), node.get_hotkey(9)) == ("good", None)
    (record,) = [record for record in caplog.records if "is not a bucket" in record.message]
    assert "uid 2 (garbage)" in record.message
    assert "127.0.0.1" not in caplog.text


async def test_a_uid_that_changed_hands_loses_its_bucket(world, node):
    world.join("old")
    await commit_as(world, "old", encode_commitment(bucket("a")))
    await node.refresh()
    assert node.get_bucket(1) == bucket("a")
    world.admin.deregister("old")
    world.join("new")
    await node.refresh()
    assert (node.get_hotkey(1), node.get_bucket(1)) == ("new", None)


async def test_an_answer_that_comes_after_a_newer_one_is_dropped(world, node, monkeypatch):
    """Two refreshes at a time, and the first one takes longer."""
    read, been_read, goes_on = node.chain.metagraph, asyncio.Event(), asyncio.Event()

    async def slow(block=None):
        found = await read(block)
        been_read.set()
        await goes_on.wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(node.chain, "metagraph", slow)
        first = asyncio.create_task(node.refresh())
        await been_read.wait()
    world.join("new")
    await node.refresh()
    block = node.metagraph.block
    goes_on.set()
    await first
    assert (node.get_hotkey(1), node.metagraph.block) == ("new", block)


async def test_buckets_of_a_window_are_those_at_its_end_whenever_they_are_asked_for(world, node, caplog):
    world.join("peer")
    await commit_as(world, "peer", encode_commitment(bucket("a")))
    block = await node.chain.head()
    window = node.block_to_window(block)
    while node.block_to_window(await node.chain.head()) == window:
        world.pass_blocks(1)
    world.pass_blocks(1)
    late = ChainManager(node.chain, blocks_per_window=3)
    assert await node.buckets_in(window) == {1: bucket("a")}
    await commit_as(world, "peer", encode_commitment(bucket("b")))
    world.admin.deregister("me")
    world.pass_blocks(4)
    assert await node.buckets_in(window) == await late.buckets_in(window) == {1: bucket("a")}
    assert (await node.hotkeys_in(window)).get(1) == (await late.hotkeys_in(window)).get(1) is not None
    assert await node.buckets_in(node.block_to_window(await node.chain.head()) - 1) == {1: bucket("b")}
    with pytest.raises(ChainUnavailable):
        await node.buckets_in(node.block_to_window(await node.chain.head()))
    assert caplog.text == ""


async def test_buckets_that_the_chain_forgot_are_never_guessed(make_world):
    """A node that used today's buckets instead would apply other updates than all other nodes."""
    world = make_world(retained_blocks=5)
    world.join("me", "peer")
    await commit_as(world, "peer", encode_commitment(bucket("a")))
    world.pass_blocks(4)
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        node, late = (ChainManager(chain, blocks_per_window=3) for _ in range(2))
        known = await node.buckets_in(1)
        await late.window_start(2)
        world.pass_blocks(20)
        for manager in (node, late):
            await manager.refresh()
        assert await node.buckets_in(1) == known == {1: bucket("a")}
        with pytest.raises(ChainUnavailable, match=r"--subtensor\.archive") as refused:
            await late.buckets_in(1)
        assert refused.value.name == "StateDiscarded"
    async with LocalChain(world.path, "me", clock=world.clock, archive=True) as archive:
        assert await ChainManager(archive, blocks_per_window=3).buckets_in(1) == known


async def test_electors_of_a_window_are_those_at_its_first_block_whenever_they_are_asked_for(make_world, caplog):
    world = make_world(retained_blocks=8)
    world.join("me", "small", "large", stake=50.0, permit=True)
    world.admin.set_stake("small", 20.0)
    for hotkey in ("small", "large"):
        await commit_as(world, hotkey, encode_commitment(bucket("a")))
    world.pass_blocks(3)
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        node, late = (ChainManager(chain, blocks_per_window=3, elector_share=0.2) for _ in range(2))
        window = node.block_to_window(await chain.head())
        known = await node.electors_in(window)
        assert [(one.uid, one.stake) for one in known.ranked] == [(2, 50 * 10**9), (1, 20 * 10**9)]
        world.admin.set_stake("small", 10.0)
        world.pass_blocks(3)
        assert await node.electors_in(window) == known == await late.electors_in(window)
        assert (await node.electors_in(window + 1)).uids == (2,)
        world.pass_blocks(20)
        await late.refresh()
        assert await late.electors_in(window) == known
        assert (await late.electors_in(window + 2)).uids == late.electors.uids == (2,)
        assert "using the present ones" in caplog.text


async def test_a_reason_is_logged_once_for_each_commitment(world, node, caplog):
    world.join("garbage")
    await commit_as(world, "garbage", "one")
    world.pass_blocks(3)
    window = node.block_to_window(await node.chain.head()) - 1
    await node.refresh()
    await commit_as(world, "garbage", "other")
    for _ in range(2):
        await node.refresh()
        await node.buckets_in(window)
    assert caplog.text.count("is not a bucket") == 2


async def test_a_subnet_without_neurons_is_not_believed(world, node):
    await node.refresh()
    world.admin.deregister("me")
    world.pass_blocks(1)
    with pytest.raises(ChainUnavailable, match="no neurons at block"):
        await node.refresh()
    assert node.uid == 0


async def test_a_hotkey_without_uid_is_told_what_to_do(world, node):
    world.join("other")
    world.admin.deregister("me")
    world.pass_blocks(1)
    await node.refresh()
    with pytest.raises(NotRegistered, match="hotkey me has no uid on subnet 1"):
        _ = node.uid


async def test_background_refresh_outlives_a_failing_chain(world, node):
    node.chain.fail("metagraph", "lost", "lost", "lost")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(node.run_refresh())
        while node._metagraph is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        world.join("later")
        while node.metagraph.uid_of("later") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()


async def test_a_failed_refresh_keeps_what_was_known(node):
    await node.refresh()
    before = node.metagraph
    node.chain.fail("metagraph", "lost")
    with pytest.raises(ChainUnavailable):
        await node.refresh()
    assert node.metagraph is before


async def test_the_leader_has_most_stake_a_permit_and_a_bucket(world, node):
    assert [await node.refresh(), node.highest_stake_validator()] == [None, None]
    world.join("bucketless", "first", "second", "unpermitted", stake=50.0, permit=True)
    world.admin.set_stake("bucketless", 90.0)
    world.admin.set_stake("unpermitted", 80.0)
    world.admin.set_permit("unpermitted", granted=False)
    for hotkey in ("first", "second", "unpermitted"):
        await commit_as(world, hotkey, encode_commitment(bucket("a")))
    await node.refresh()
    assert node.highest_stake_validator() == 2
    world.admin.set_stake("second", 50.5)
    world.pass_blocks(1)
    await node.refresh()
    assert node.highest_stake_validator() == 3


async def test_the_chain_can_be_asked_at_once(world, node):
    world.join("good", "garbage")
    await commit_as(world, "good", encode_commitment(bucket("a")))
    await commit_as(world, "garbage", "garbage")
    assert await node.get_commitments() == {1: bucket("a")}
    assert [await node.get_commitment(uid) for uid in (1, 2, 7)] == [bucket("a"), None, None]
    assert await node.get_bucket_for_neuron() is None
    assert await node.get_bucket_for_neuron("good") == bucket("a")
    with pytest.raises(ValueError, match="128 characters"):
        await node.get_bucket_for_neuron("garbage")


# Windows


async def test_the_clock_follows_the_chain(world, node):
    async with asyncio.TaskGroup() as group:
        running = group.create_task(node.clock.run())
        assert await node.clock.wait_for_window(0) == node.block_to_window(node.clock.block)
        world.pass_blocks(7)
        assert await world.clock.drive(node.clock.wait_for_window(2)) == 2
        running.cancel()


async def test_a_windows_seed_comes_from_its_first_blocks_hash(world, make_world, node):
    world.pass_blocks(10)
    assert await node.window_to_seed(2) == derive("window", world.admin.block(6).hash)
    assert await node.window_to_seed(2) != await node.window_to_seed(1)
    with pytest.raises(ChainUnavailable, match="no block 15"):
        await node.window_to_seed(5)


async def test_a_window_starts_with_its_first_block(world, node):
    world.pass_blocks(10)
    start = await node.window_start(2)
    assert start == world.admin.block(6)
    assert await node.window_hash(2) == start.hash
    assert [node.block_to_window(block) for block in (5, 6, 8, 9)] == [1, 2, 2, 3]
    with pytest.raises(ChainUnavailable, match="no block 15"):
        await node.window_start(5)


async def test_upload_bounds_start_at_the_next_windows_first_block(world, node):
    world.pass_blocks(10)
    start = world.admin.block(9).time
    assert await node.upload_bounds(2, 7.5) == UploadBounds(start=start, end=start + 7.5)
    with pytest.raises(ChainUnavailable):
        await node.upload_bounds(3, 7.5)


async def test_first_blocks_are_remembered_when_the_chain_forgets(make_world):
    world = make_world(retained_blocks=5)
    world.pass_blocks(7)
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        node = ChainManager(chain, blocks_per_window=3)
        start = await node.window_start(2)
        world.pass_blocks(20)
        assert await node.window_start(2) == start
        with pytest.raises(ChainUnavailable, match="dropped"):
            await node.window_start(1)


async def test_a_window_that_has_just_begun_is_waited_for_until_it_is_final(make_world):
    world = make_world(finality_lag=2)
    world.pass_blocks(6)
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        node = ChainManager(chain, blocks_per_window=3)
        asked = asyncio.create_task(node.window_start(2))
        await asyncio.sleep(0.05)
        assert not asked.done()
        assert (await world.clock.drive(asked)).number == 6
        assert await chain.head() == 8


async def test_a_stall_of_finality_is_said_once(make_world, caplog):
    world = make_world(finality_lag=1000)
    world.pass_blocks(9)
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        node = ChainManager(chain, blocks_per_window=3)
        following = asyncio.create_task(node.clock.run())
        waiting = asyncio.gather(node.window_start(2), node.window_start(3))
        with caplog.at_level(logging.INFO):
            await world.clock.drive(node.clock.wait_for_block(35))
            chain._ledger.genesis = dataclasses.replace(chain._ledger.genesis, finality_lag=0)
            await world.clock.drive(waiting)
        following.cancel()
    stalled, resumed = [record.message for record in caplog.records if "final" in record.message]
    assert stalled == "block 6 is not final yet, 10 blocks (120 s) after it: everything that needs it waits"
    assert re.fullmatch(r"block [69] is final, \d\d blocks \(\d+ s\) after it", resumed)


async def test_a_window_that_has_begun_is_waited_for_if_the_next_endpoint_lags(world, node):
    following = asyncio.create_task(node.clock.run())
    world.pass_blocks(6 - world.admin.look()[0])
    await world.clock.drive(node.clock.wait_for_block(6))
    node.chain.lag = 2
    asked = asyncio.create_task(node.window_start(node.clock.window))
    assert (await world.clock.drive(asked)).number == 6
    with pytest.raises(ChainUnavailable, match="no block"):
        await node.window_start(node.clock.window + 2)
    following.cancel()


# Writes


async def test_a_bucket_is_committed_once(world, node):
    assert await world.clock.drive(node.try_commit(bucket("a"))) is True
    assert await world.clock.drive(node.try_commit(bucket("a"))) is False
    assert node.chain.calls.count("commit") == 1
    assert await world.clock.drive(node.try_commit(bucket("b"))) is True
    await node.refresh()
    assert node.get_bucket(node.uid) == bucket("b")


@pytest.mark.parametrize(("fault", "commits"), [("landed", 1), ("late", 1), ("lost", 2), ("vanished", 2)])
async def test_a_commit_of_unknown_fate_is_looked_for_before_it_is_repeated(world, node, fault, commits):
    node.chain.fail("commit", fault)
    assert await world.clock.drive(node.try_commit(bucket("a"))) is True
    assert node.chain.calls.count("commit") == commits
    assert (await node.chain.commitments(["me"]))["me"].data == encode_commitment(bucket("a"))


async def test_a_commit_that_never_lands_is_an_error(world, node):
    node.chain.fail("commit", *["lost"] * 10)
    with pytest.raises(ChainUnavailable, match="not on chain after 5 attempts"):
        await world.clock.drive(node.try_commit(bucket("a")))


async def test_a_refusal_of_the_chain_is_not_repeated(world, node):
    world.admin.deregister("me")
    world.pass_blocks(1)
    with pytest.raises(NotRegistered):
        await world.clock.drive(node.try_commit(bucket("a")))
    assert node.chain.calls.count("commit") == 1


@pytest.fixture
def validator(world, node):
    world.admin.set_stake("me", 100.0)
    world.admin.set_permit("me")
    world.pass_blocks(6)
    return node


@pytest.mark.parametrize(
    ("faults", "calls"), [(["landed"], 1), (["late"], 1), (["lost"], 2), (["vanished", "landed"], 2)]
)
async def test_weights_of_unknown_fate_are_looked_for_before_they_are_repeated(world, validator, faults, calls):
    validator.chain.fail("set_weights", *faults)
    block = await world.clock.drive(validator.set_weights({0: 1.0}))
    assert validator.chain.calls.count("set_weights") == calls
    assert await validator.chain.weights(block) == {0: {0: 1.0}}
    assert await validator.chain.weights(block - 1) == {}


async def test_a_block_that_the_endpoint_lacks_is_not_waited_for(world, node, monkeypatch):
    """It is at the head, so no later block brings it."""
    following = asyncio.create_task(node.clock.run())
    world.pass_blocks(6 - world.admin.look()[0])
    await world.clock.drive(node.clock.wait_for_block(6))

    async def missing(number):
        raise ChainUnavailable(f"no block at height {number}", name="UnknownBlock")

    monkeypatch.setattr(node.chain, "block", missing)
    asked = asyncio.create_task(node.window_start(node.clock.window))
    world.pass_blocks(1)
    with pytest.raises(ChainUnavailable, match="no block at height"):
        await asyncio.wait_for(world.clock.drive(asked), 10)
    following.cancel()


async def test_an_endpoint_that_lags_does_not_make_earlier_weights_look_like_these(world, validator, monkeypatch):
    """It says an older last update; the true one, read after it, is of weights that were set before."""
    before = await world.clock.drive(validator.set_weights({0: 1.0}))
    validator.chain.fail("set_weights", "lost", "lost")
    read, reads = validator._last_update, 0

    async def once_behind():
        nonlocal reads
        reads += 1
        return await read() - (3 if reads == 2 else 0)

    monkeypatch.setattr(validator, "_last_update", once_behind)
    world.pass_blocks(6)
    block = await world.clock.drive(validator.set_weights({0: 0.5}))
    assert block > before
    assert validator.chain.calls.count("set_weights") == 4


@pytest.mark.parametrize("call", ["commit", "set_weights"])
async def test_a_write_of_unknown_fate_is_given_blocks_to_land_in(world, validator, call):
    """Without blocks in between, reading proves nothing: the call may wait in the pool."""
    validator.retry_interval = 0.0
    validator.chain.fail(call, "late")
    write = validator.try_commit(bucket("a")) if call == "commit" else validator.set_weights({0: 1.0})
    writing = asyncio.create_task(write)
    await asyncio.sleep(0.2)
    assert validator.chain.calls.count(call) == 1
    await world.clock.drive(writing)
    assert validator.chain.calls.count(call) == 1


async def test_weights_that_land_late_do_not_look_like_a_rate_limit(world, validator):
    """The first attempt waits in the pool while the second is checked, and is included before the second is sent."""
    chain = validator.chain._chain
    sends = 0
    send = chain.set_weights

    async def first_goes_unanswered(weights):
        nonlocal sends
        sends += 1
        if sends == 1:
            sending = asyncio.ensure_future(send(weights))
            await asyncio.sleep(0.05)
            sending.cancel()
            raise ChainUnavailable("no answer")
        world.pass_blocks(1)
        return await send(weights)

    chain.set_weights = first_goes_unanswered
    block = await validator.set_weights({0: 1.0})
    assert sends == 2
    assert await chain.weights(block) == {0: {0: 1.0}}


async def test_refusals_of_weights_are_passed_on_at_once(world, validator):
    await world.clock.drive(validator.set_weights({0: 1.0}))
    with pytest.raises(RateLimited):
        await validator.set_weights({0: 1.0})
    world.admin.set_stake("me", 0.0)
    world.pass_blocks(6)
    with pytest.raises(NotPermitted):
        await validator.set_weights({0: 1.0})
    assert validator.chain.calls.count("set_weights") == 3


async def test_weights_give_up_after_some_attempts(world, validator):
    validator.chain.fail("set_weights", *["lost"] * 10)
    with pytest.raises(ChainUnavailable, match="no answer"):
        await validator.set_weights({0: 1.0})
    assert validator.chain.calls.count("set_weights") == 5
