"""The contract of every chain, on each implementation: in virtual time, between processes, and through the real SDK.

With ``CHAIN_URL`` set, the tests that suit any chain also run on the node at that address.
"""

import asyncio
import os
import re
from contextlib import aclosing
from functools import partial

import pytest

pytest.importorskip("bittensor")

from worlds import WORLDS

from tplr.chain import ChainManager, hotkeys
from tplr.chain.subtensor import SubtensorChain
from tplr.errors import ChainUnavailable, NotPermitted, NotRegistered, RateLimited, Rejected
from tplr.schemas import Bucket

BUCKET = Bucket(name="a" * 32, account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)


@pytest.fixture(params=WORLDS)
def kind(request):
    return WORLDS[request.param]


# Blocks


async def test_blocks_come_once_each_in_order_without_gaps(kind, tmp_path):
    async with kind(tmp_path) as world, aclosing((await world.open("me")).blocks()) as blocks:
        seen = [await world.act(anext(blocks)) for _ in range(4)]
        assert seen == list(range(seen[0], seen[0] + 4))


async def test_only_final_blocks_are_told_and_they_never_change(kind, tmp_path):
    async with kind(tmp_path, finality_lag=2) as world:
        me, other = await world.open("me"), await world.open("other")
        head = await world.pass_blocks(5)
        blocks = [await me.block(number) for number in range(1, head - 2)]
        assert blocks == [await other.block(block.number) for block in blocks]
        assert all(re.fullmatch("0x[0-9a-f]{64}", block.hash) for block in blocks)
        times = [block.time for block in blocks]
        assert times == sorted(set(times))
        assert ((await me.block(0)).hash, (await me.block(0)).time) == (me.genesis, 0.0)
        with pytest.raises(ChainUnavailable) as refused:
            await me.block(await me.head() + 1)
        assert refused.value.name in ("UnknownBlock", "NotFinal")  # the next block may come between
        with pytest.raises(ChainUnavailable) as refused:
            await me.block(await me.head() + 100)
        assert refused.value.name == "UnknownBlock"
        with pytest.raises(ChainUnavailable) as refused:
            await me.block(await me.head())
        assert refused.value.name == "NotFinal"


async def test_old_state_is_told_by_archives_only(kind, tmp_path):
    async with kind(tmp_path, retained=2) as world:
        await world.join("me")
        at = await world.pass_blocks(1)
        me, archive = await world.open("me"), await world.open("other", archive=True)
        await world.pass_blocks(4)
        commitments = partial(me.commitments, [me.hotkey])
        for read in (me.block, me.metagraph, commitments, me.weights):
            with pytest.raises(ChainUnavailable) as refused:
                await read(at)
            assert refused.value.name == "StateDiscarded"
            assert "--subtensor.archive" in str(refused.value)
        assert (await archive.block(at)).number == at
        assert (await archive.metagraph(at)).uid_of(me.hotkey) == 0
        assert await archive.commitments([me.hotkey], at) == await archive.weights(at) == {}


# Registered nodes


async def test_the_metagraph_is_that_of_its_block(kind, tmp_path):
    async with kind(tmp_path) as world:
        me, other = await world.open("me"), await world.open("other")
        await world.join("me", stake=25.5)
        before = await world.pass_blocks(1)
        await world.join("other", stake=0.000000001, permit=True)
        graph = await other.metagraph()
        assert [(neuron.uid, neuron.hotkey) for neuron in graph.neurons] == [(0, me.hotkey), (1, other.hotkey)]
        assert [(neuron.stake, neuron.permit) for neuron in graph.neurons] == [(25.5, False), (1e-9, True)]
        assert 0 < graph.neurons[0].last_update <= before < graph.neurons[1].last_update <= graph.block
        assert [neuron.uid for neuron in (await me.metagraph(before)).neurons] == [0]
        assert (await me.metagraph(before)).block == before
        with pytest.raises(ChainUnavailable) as refused:
            await me.metagraph(10**6)
        assert refused.value.name == "UnknownBlock"


async def test_a_uid_changes_hands(kind, tmp_path):
    async with kind(tmp_path, max_uids=2, immunity_period=0) as world:
        me = await world.open("me")
        await world.join("old", "me")
        await world.join("new")
        holders = [neuron.hotkey for neuron in (await me.metagraph()).neurons]
        assert holders == [world.address("new"), me.hotkey]


# Commitments


async def test_a_commitment_takes_effect_in_its_block_for_all(kind, tmp_path):
    async with kind(tmp_path) as world:
        me, other = await world.open("me"), await world.open("other")
        await world.join("me", "other")
        before = await me.head()
        first = await world.act(me.commit("hello"))
        second = await world.act(me.commit("x" * 128))
        assert before < first < second
        assert await world.act(other.commit("")) > 0
        seen = await other.commitments([other.hotkey, me.hotkey])
        assert (seen[me.hotkey].data, seen[me.hotkey].block) == ("x" * 128, second)
        assert seen[other.hotkey].data == ""
        earlier = await other.commitments([me.hotkey, other.hotkey], first)
        assert [(hotkey, one.data) for hotkey, one in earlier.items()] == [(me.hotkey, "hello")]
        assert await other.commitments([me.hotkey], before) == await other.commitments([]) == {}


async def test_commitments_hold_128_bytes_of_registered_hotkeys(kind, tmp_path):
    async with kind(tmp_path) as world:
        stranger = await world.open("stranger")
        with pytest.raises(NotRegistered) as refused:
            await world.act(stranger.commit("x"))
        assert refused.value.name == "AccountNotAllowedCommit"
        with pytest.raises(Rejected, match="129"):
            await stranger.commit("é" * 64 + "a")


async def test_commitments_have_a_quota(kind, tmp_path):
    async with kind(tmp_path, commitment_quota=200, tempo=1000) as world:
        await world.join("me")
        me = await world.open("me")
        await world.act(me.commit("one"))
        await world.act(me.commit("two"))
        with pytest.raises(RateLimited) as refused:
            await world.act(me.commit("three"))
        assert refused.value.name == "SpaceLimitExceeded"
        assert (await me.commitments([me.hotkey]))[me.hotkey].data == "two"


async def test_a_commitment_outlives_its_registration(kind, tmp_path):
    async with kind(tmp_path) as world:
        await world.join("me")
        me = await world.open("me")
        await world.act(me.commit("mine"))
        world.admin.deregister(me.hotkey)
        await world.pass_blocks(1)
        assert (await me.metagraph()).uid_of(me.hotkey) is None
        assert (await me.commitments([me.hotkey]))[me.hotkey].data == "mine"
        with pytest.raises(NotRegistered):
            await world.act(me.commit("again"))


async def test_writes_of_one_hotkey_go_one_after_the_other(kind, tmp_path):
    async with kind(tmp_path) as world:
        await world.join("me")
        me = await world.open("me")
        blocks = await world.act(asyncio.gather(*(me.commit(text) for text in "abc")))
        assert blocks == sorted(set(blocks))
        assert (await me.commitments([me.hotkey]))[me.hotkey].data == "c"


async def test_a_cancelled_write_may_land_all_the_same(kind, tmp_path):
    async with kind(tmp_path) as world:
        await world.join("me")
        me = await world.open("me")
        await world.pass_blocks(1)
        writing = asyncio.create_task(me.commit("hello"))
        await asyncio.sleep(0.1)
        writing.cancel()
        await asyncio.wait([writing])
        await world.pass_blocks(2)
        assert (await me.commitments([me.hotkey]))[me.hotkey].data == "hello"
        assert await world.act(me.commit("and on")) > 0


async def test_a_bucket_is_committed_once(kind, tmp_path):
    async with kind(tmp_path) as world:
        await world.join("me")
        manager = ChainManager(await world.open("me"), blocks_per_window=3, retry_interval=0.05)
        assert await world.act(manager.try_commit(BUCKET)) is True
        assert await world.act(manager.try_commit(BUCKET)) is False
        assert await manager.get_commitments() == {0: BUCKET}


# Weights


async def test_weights_are_read_back_as_fractions(kind, tmp_path):
    async with kind(tmp_path) as world:
        await world.join("me", "one", "two", stake=100.0, permit=True)
        me, other = await world.open("me"), await world.open("one")
        before = await me.head()
        block = await world.act(me.set_weights({1: 3.0, 2: 1.0, 0: 0.0}))
        assert block > before
        assert await other.weights() == {0: pytest.approx({1: 0.75, 2: 0.25}, abs=1e-4)}
        assert await other.weights(before) == {}
        assert (await me.metagraph()).neurons[0].last_update == block


async def test_a_share_above_the_chains_limit_is_lowered_to_it(kind, tmp_path):
    async with kind(tmp_path, max_weight=39321) as world:
        await world.join("me", "one", "two", stake=100.0, permit=True)
        me = await world.open("me")
        assert await me.max_weight() == 0.6
        await world.act(me.set_weights({0: 0.05, 1: 0.75, 2: 0.2}))
        assert await me.weights() == {0: pytest.approx({0: 0.08, 1: 0.6, 2: 0.32}, abs=1e-4)}


async def test_weights_are_rate_limited_from_registration_on(kind, tmp_path):
    async with kind(tmp_path, weights_rate_limit=100) as world:
        await world.join("me", stake=100.0, permit=True)
        me = await world.open("me")
        with pytest.raises(RateLimited):
            await world.act(me.set_weights({0: 1.0}))
        await world.pass_blocks(100)
        assert await world.act(me.set_weights({0: 1.0})) > 0
        with pytest.raises(RateLimited):
            await world.act(me.set_weights({0: 1.0}))


async def test_weights_need_a_uid_a_permit_and_stake(kind, tmp_path):
    async with kind(tmp_path, tempo=60_000) as world:
        await world.join("poor", "unpermitted")
        world.admin.set_stake(world.address("unpermitted"), 100.0)
        await world.pass_blocks(1)
        for name, error, reason in [
            ("poor", NotPermitted, "StakeAmountTooLow"),
            ("unpermitted", NotPermitted, "NeuronNoValidatorPermit"),
            ("stranger", NotRegistered, "HotKeyNotRegisteredInSubNet"),
        ]:
            with pytest.raises(error) as refused:
                await world.act((await world.open(name)).set_weights({0: 1.0}))
            assert refused.value.name == reason


async def test_wrong_weights_are_rejected(kind, tmp_path):
    async with kind(tmp_path, min_allowed_weights=2) as world:
        await world.join("me", "one", "two", stake=100.0, permit=True)
        me = await world.open("me")
        for weights, name in [
            ({1: 1.0, 7: 1.0}, "UidVecContainInvalidOne"),
            ({0: 0.0}, "WeightVecAllZero"),
            ({1: float("nan")}, "InvalidWeight"),
            ({1: 1.0}, "WeightVecLengthIsLow"),
        ]:
            with pytest.raises(Rejected) as refused:
                await world.act(me.set_weights(weights))
            assert refused.value.name == name
        assert await me.weights() == {}


async def test_sealed_weights_are_not_in_force_at_once(kind, tmp_path):
    async with kind(tmp_path, commit_reveal=True, weights_rate_limit=50, tempo=1000) as world:
        await world.join("me", "one", stake=100.0, permit=True)
        me = await world.open("me")
        await world.pass_blocks(50)
        block = await world.act(me.set_weights({1: 1.0}))
        assert (await me.metagraph()).neurons[0].last_update == block
        assert await me.weights() == {}
        with pytest.raises(RateLimited) as refused:
            await world.act(me.set_weights({1: 1.0}))
        assert refused.value.name == "CommittingWeightsTooFast"


# Signatures


async def test_a_signature_is_verified_by_the_address_alone(kind, tmp_path):
    async with kind(tmp_path) as world:
        me, other = await world.open("me"), await world.open("other")
        signature = me.sign(b"message")
        assert hotkeys.verify(me.hotkey, b"message", signature)
        assert not hotkeys.verify(me.hotkey, b"another", signature)
        assert not hotkeys.verify(other.hotkey, b"message", signature)


# A live node


@pytest.mark.skipif("CHAIN_URL" not in os.environ, reason="CHAIN_URL names no node")
async def test_a_live_node_answers_as_promised(tmp_path):
    """Only reads, with an unregistered hotkey. ``CHAIN_NETUID`` chooses the subnet (default: 3)."""
    import bittensor as bt

    netuid = int(os.environ.get("CHAIN_NETUID", "3"))
    bt.Wallet("node", "default", str(tmp_path)).create_new_hotkey(use_password=False, suppress=True)
    where = {"wallet_path": tmp_path, "wallet_name": "node", "hotkey": "default"}
    chain = await SubtensorChain.open(os.environ["CHAIN_URL"], netuid=netuid, **where)
    try:
        async with aclosing(chain.blocks()) as blocks:
            first = await anext(blocks)
            assert await anext(blocks) == first + 1
        final = await chain.block(first - 20)
        assert re.fullmatch("0x[0-9a-f]{64}", final.hash)
        assert final.time < (await chain.block(first - 19)).time
        graph = await chain.metagraph(first)
        assert [neuron.uid for neuron in graph.neurons] == sorted({neuron.uid for neuron in graph.neurons})
        assert graph.uid_of(chain.hotkey) is None
        committed = await chain.commitments([neuron.hotkey for neuron in graph.neurons], first)
        assert all(commitment.block <= first for commitment in committed.values())
        assert all(sum(row.values()) == pytest.approx(1) for row in (await chain.weights(first)).values())
        with pytest.raises(ChainUnavailable) as refused:
            await chain.block(first + 1000)
        assert refused.value.name == "UnknownBlock"
    finally:
        await chain.close()
