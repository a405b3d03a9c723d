"""Chain faults as a node sees them: windows stay right, no duplicate writes, full recovery.

Each test runs on ``LocalChain`` behind ``FaultyChain``, in virtual time, and on ``SubtensorChain`` at a node with real
faults: broken sockets, missing answers, a pool that refuses or forgets.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bittensor")

from faulty import FaultyChain
from worlds import ManualWorld, NodeWorld, World

from tplr.chain import ChainManager
from tplr.chain.commitment import encode_commitment
from tplr.clock import Tick
from tplr.errors import ChainUnavailable, NotPermitted, NotRegistered, RateLimited
from tplr.schemas import Bucket

BLOCKS_PER_WINDOW = 3
BUCKET = Bucket(name="a" * 32, account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)
OTHER = Bucket(name="d" * 32, account_id="d" * 32, access_key_id="e" * 32, secret_access_key="f" * 64)


class Rig:
    """A world, one node's view of it, and a way to inject faults there.

    Attributes:
        patience: seconds after which faults are certain to be noticed.
        three_windows: duration of three windows in seconds.
    """

    patience = 0.0
    three_windows = 0.0

    def __init__(self, world: World) -> None:
        self.world = world

    async def open(self) -> None:
        await self.world.join("me", stake=100.0, permit=True)
        self.chain: Any = await self.world.open("me")
        self.use(self.chain)

    def use(self, chain: Any) -> None:
        self.manager = ChainManager(chain, blocks_per_window=BLOCKS_PER_WINDOW, retry_interval=0.05)

    def rows(self, table: str) -> int:
        """Return the number of all writes on chain so far."""
        (count,) = self.world.admin._db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
        return count

    async def advance(self, blocks: int) -> None:
        await self.world.pass_blocks(blocks)
        await asyncio.sleep(0.1)  # for the stream


class LocalRig(Rig):
    chain: FaultyChain

    async def open(self) -> None:
        await super().open()
        self.chain = FaultyChain(self.chain)
        self.use(self.chain)

    async def break_stream(self, fault: str) -> None:
        self.chain.silent = fault != "lagging"
        self.chain.lag = 2

    async def mend_stream(self) -> None:
        self.chain.silent, self.chain.lag = False, 0

    def spoil_write(self, call: str, fault: str) -> None:
        self.chain.fail(call, {"refused": "lost", "forgotten": "vanished", "cut": "landed", "mute": "late"}[fault])

    def mend_write(self) -> None:
        pass

    def stop(self) -> None:
        """Does nothing: virtual time only moves when a test advances it."""

    def go_on(self) -> None:
        pass


class NodeRig(Rig):
    world: NodeWorld
    patience = 0.6
    three_windows = 3 * BLOCKS_PER_WINDOW * NodeWorld.block_time

    async def break_stream(self, fault: str) -> None:
        faults = self.world.node.faults
        match fault:
            case "dropped":
                self.world.node.drop_connections()
            case "down":
                await self.world.node.stop()
            case "silent":
                faults.silent = True
            case "mute":
                faults.mute = True
            case "lagging":
                faults.lag = 2
            case "throttled":
                faults.throttle = "your account has exceeded its rate limit"
                self.world.node.drop_connections()

    async def mend_stream(self) -> None:
        node = self.world.node
        node.faults.silent = node.faults.mute = False
        node.faults.lag, node.faults.throttle = 0, ""
        if not node.listening:
            await node.start(node.port)

    def spoil_write(self, call: str, fault: str) -> None:
        faults = self.world.node.faults
        match fault:
            case "refused":
                faults.refuse = "Transaction would exhaust the block limits"
            case "forgotten":
                faults.lose = True
            case "cut":
                faults.cut = True
            case "mute":
                faults.mute_writes = True

    def mend_write(self) -> None:
        faults = self.world.node.faults
        faults.refuse, faults.lose, faults.cut, faults.mute_writes = "", False, False, False

    def stop(self) -> None:
        self.world.clock.stop()

    def go_on(self) -> None:
        self.world.clock.go_on()


RIGS = {"local": (LocalRig, ManualWorld), "node": (NodeRig, NodeWorld)}


@pytest.fixture(params=RIGS)
async def rig(request, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tplr.chain.subtensor.adapter.READ_SECONDS", 1.0)
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.ONLY_DIAL_SECONDS", 1.0)
    monkeypatch.setattr("tplr.chain.subtensor.adapter.WRITE_SECONDS", 0.5)
    monkeypatch.setattr("tplr.chain.subtensor.adapter.WRITE_BLOCKS", 2)
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.PROBE_SECONDS", 0.3)
    monkeypatch.setattr("tplr.chain.follow.STALL_BLOCKS", 2)
    monkeypatch.setattr("tplr.chain.follow.CLOSE_TIMEOUT", 0.1)
    make, world = RIGS[request.param]
    async with world(tmp_path) as made:
        rig = make(made)
        await rig.open()
        yield rig


class Watch:
    """A node's clock at work, and all the ticks it gave."""

    def __init__(self, manager: ChainManager) -> None:
        self.clock = manager.clock
        self.ticks: list[Tick] = []

    async def __aenter__(self):
        self._group = await asyncio.TaskGroup().__aenter__()
        self._tasks = [self._group.create_task(self.clock.run()), self._group.create_task(self._collect())]
        return self

    async def __aexit__(self, *error):
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(*error)

    async def _collect(self):
        async for tick in self.clock.ticks():
            self.ticks.append(tick)


# The stream of blocks


@pytest.mark.parametrize("fault", ["dropped", "down", "silent", "mute", "lagging", "throttled"])
async def test_windows_stay_right(rig, fault):
    async with Watch(rig.manager) as watch:
        await rig.world.act(watch.clock.wait_for_block(rig.world.admin.look()[0] + 1))
        await rig.break_stream(fault)
        await rig.advance(2 * BLOCKS_PER_WINDOW)
        await asyncio.sleep(rig.patience)
        await rig.mend_stream()
        goal = rig.world.admin.look()[0] + BLOCKS_PER_WINDOW
        await rig.world.act(asyncio.wait_for(watch.clock.wait_for_block(goal), 20))
        # The newest window by the chain itself; and the ticks account for every window before it.
        assert goal <= watch.clock.block <= rig.world.admin.look()[0]
        await asyncio.sleep(0.01)
        for before, after in zip(watch.ticks, watch.ticks[1:], strict=False):
            assert after.window == before.window + after.missed + 1
        assert watch.ticks[-1].window == rig.manager.block_to_window(watch.clock.block)
        window = watch.ticks[0].window
        assert await rig.manager.window_start(window) == rig.world.admin.block(window * BLOCKS_PER_WINDOW)


async def test_a_chain_that_stops_for_three_windows_stops_the_windows(rig, caplog):
    async with Watch(rig.manager) as watch:
        await rig.world.act(watch.clock.wait_for_block(rig.world.admin.look()[0] + 1))
        rig.stop()
        at, ticks = watch.clock.block, len(watch.ticks)
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(rig.three_windows)
        assert watch.clock.block - at <= 1  # one block may have been in flight
        assert len(watch.ticks) - ticks <= 1
        assert rig.patience == 0.0 or watch.clock.seconds_left() == 0.0
        assert (await rig.manager.chain.metagraph()).block >= at
        rig.go_on()
        following = watch.clock.window + 1
        await rig.world.act(asyncio.wait_for(watch.clock.wait_for_window(following), 20))
        await asyncio.sleep(0.01)
        assert watch.ticks[-1] == Tick(following, 0)
    if isinstance(rig, NodeRig):
        assert "no new block for too long" in caplog.text
        assert "is stuck at block" in caplog.text


# Writes


@pytest.mark.parametrize("fault", ["refused", "forgotten", "cut", "mute"])
async def test_a_commitment_lands_once(rig, fault):
    rig.spoil_write("commit", fault)
    committing = asyncio.ensure_future(rig.world.act(rig.manager.try_commit(BUCKET)))
    await asyncio.sleep(0.3)
    rig.mend_write()
    assert await asyncio.wait_for(committing, 20) is True
    assert rig.rows("commitment") == 1
    await rig.manager.refresh()
    assert rig.manager.get_bucket(rig.manager.uid) == BUCKET
    assert await rig.world.act(rig.manager.try_commit(BUCKET)) is False


@pytest.mark.parametrize("fault", ["refused", "forgotten", "cut", "mute"])
async def test_weights_land_once(rig, fault):
    rig.spoil_write("set_weights", fault)
    setting = asyncio.ensure_future(rig.world.act(rig.manager.set_weights({0: 1.0})))
    await asyncio.sleep(0.3)
    rig.mend_write()
    block = await asyncio.wait_for(setting, 20)
    assert rig.rows("weights") == 1
    assert (await rig.manager.chain.metagraph()).neurons[0].last_update == block
    assert await rig.manager.chain.weights() == {0: {0: 1.0}}


async def test_a_rate_limit_is_said_and_passes(rig):
    rig.world.admin.set_limits(weights_rate_limit=80, commitment_quota=100)
    await rig.world.pass_blocks(1)
    await rig.world.pass_blocks(80)
    await rig.world.act(rig.manager.set_weights({0: 1.0}))
    with pytest.raises(RateLimited):
        await rig.world.act(rig.manager.set_weights({0: 1.0}))
    with pytest.raises(RateLimited, match="SpaceLimitExceeded"):
        await rig.world.act(rig.manager.try_commit(BUCKET))
    assert (rig.rows("weights"), rig.rows("commitment")) == (1, 0)
    rig.world.admin.set_limits(commitment_quota=3000)
    await rig.world.pass_blocks(80)
    await rig.world.act(rig.manager.set_weights({0: 1.0}))
    assert await rig.world.act(rig.manager.try_commit(BUCKET)) is True


# Registered nodes


async def test_deregistration_is_said_and_a_new_registration_is_seen(rig):
    await rig.world.act(rig.manager.try_commit(BUCKET))
    await rig.manager.refresh()
    await rig.world.join("another")
    rig.world.admin.deregister(rig.manager.hotkey)
    await rig.world.pass_blocks(1)
    await rig.manager.refresh()
    with pytest.raises(NotRegistered, match=r"has no uid on subnet 1 at block \d+: register it"):
        _ = rig.manager.uid
    for write in (rig.manager.try_commit(OTHER), rig.manager.set_weights({0: 1.0})):
        with pytest.raises(NotRegistered):
            await rig.world.act(write)
    assert rig.manager.get_all_buckets() == {}
    await rig.world.join("a third", "me")
    await rig.manager.refresh()
    assert rig.manager.uid == 2
    assert rig.manager.get_bucket(2) == BUCKET


async def test_a_uid_that_changes_hotkey_loses_its_bucket(rig):
    rig.world.admin.set_limits(max_uids=2)
    await rig.world.join("old")
    old = await rig.world.open("old")
    await rig.world.act(old.commit(encode_commitment(BUCKET)))
    await rig.manager.refresh()
    assert rig.manager.get_bucket(1) == BUCKET
    world = rig.world
    world.admin.set_limits(immunity_period=0)
    world.admin.deregister(old.hotkey)
    await world.join("new")
    await rig.manager.refresh()
    assert (rig.manager.get_hotkey(1), rig.manager.get_bucket(1)) == (world.address("new"), None)


async def test_permits_come_and_go(rig):
    admin, me = rig.world.admin, rig.manager.hotkey
    admin.set_limits(weights_rate_limit=0, tempo=60_000)  # no epoch returns the permit in the meantime
    await rig.world.join("peer")
    admin.set_permit(me, granted=False)
    await rig.world.pass_blocks(1)
    with pytest.raises(NotPermitted, match="NeuronNoValidatorPermit"):
        await rig.world.act(rig.manager.set_weights({1: 1.0}))
    admin.set_permit(me)
    await rig.world.pass_blocks(1)
    await rig.world.act(rig.manager.set_weights({1: 1.0}))
    admin.set_permit(me, granted=False)
    await rig.world.pass_blocks(1)
    with pytest.raises(NotPermitted):
        await rig.world.act(rig.manager.set_weights({1: 1.0}))
    assert rig.rows("weights") == 1


async def test_reads_that_fail_keep_what_was_known(rig):
    await rig.manager.refresh()
    before = rig.manager.metagraph
    if isinstance(rig, LocalRig):
        rig.chain.fail("metagraph", "lost")
    else:
        await rig.break_stream("mute")
    with pytest.raises(ChainUnavailable):
        await rig.manager.refresh()
    assert rig.manager.metagraph is before
    await rig.mend_stream()
    if isinstance(rig, NodeRig):
        rig.world.node.drop_connections()  # a mute connection stays mute until it is given up
    await rig.manager.refresh()
    assert rig.manager.metagraph.block >= before.block
