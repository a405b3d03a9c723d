"""Peer lists, active peers, and the start of the run."""

import asyncio
from pathlib import Path

import pytest
from three_nodes import ALICE, BOB, EVIL, HOTKEYS, LEADER, W, World

from tplr.chain.ledger import Ledger
from tplr.errors import PayloadError, PreconditionFailed
from tplr.exchange.activity import PeerGroups
from tplr.hparams import HParams
from tplr.keys import gradient_key
from tplr.node.leader import Leader, published_start
from tplr.node.replica import NodeContext
from tplr.schemas import PeerList
from tplr.telemetry import Telemetry
from tplr.testing.s3server import LoseResponse, Status


async def test_the_leader_s_documents(world: World) -> None:
    leader, bob = world[LEADER], world[BOB]
    assert await bob.get_start_window() is None
    assert await bob.get_peer_list() is None
    # The answer to the first attempt is lost: the second attempt finds the object of the first.
    world.server.faults.add("^PUT .*start_window", LoseResponse(), times=2)
    world.server.faults.add("^PUT .*peers_", LoseResponse(), times=2)
    await leader.post_start_window(7)
    for first in (7, 20):
        await leader.post_peer_list(
            PeerList(peers=(first,), initial_selection=False, sync_window=3, first_effective_window=first)
        )
    await world[ALICE].post_start_window(99)  # no node reads it
    assert await bob.get_start_window() == 7
    with pytest.raises(PreconditionFailed):
        await leader.post_start_window(8)
    found = [await bob.get_peer_list(), await bob.get_peer_list(19), await bob.get_peer_list(fetch_previous=True)]
    assert [one and one.peers for one in found] == [(20,), (7,), (7,)]


async def test_peer_groups(world: World, hparams: HParams) -> None:
    leader = world[LEADER]
    for uid, window in ((LEADER, W - 1), (ALICE, W - hparams.recent_windows), (BOB, W - hparams.recent_windows - 1)):
        await world[uid].own_store.put(gradient_key(window, uid, "1"), b"x")
    assert await leader.track_active_peers(W) == PeerGroups(active=(LEADER, ALICE), eval=(ALICE,))
    assert await leader.track_active_peers(W + 1) == PeerGroups(active=(LEADER,), newly_inactive=(ALICE,))
    assert leader.peer_groups.newly_inactive == (ALICE,)
    assert leader.update_peers_with_buckets([BOB, EVIL]) == PeerGroups(active=(BOB,), eval=(BOB,))


async def test_weighted_sample(world: World) -> None:
    alice = world[ALICE]
    drawn = alice.weighted_random_sample_no_replacement([1, 2, 3, 4], [1.0, 0.0, 5.0, 1.0], 3)
    assert sorted(drawn) == [1, 3, 4]
    firsts = [alice.weighted_random_sample_no_replacement([1, 2], [1, 9], 1, seed=seed)[0] for seed in range(300)]
    assert 240 < firsts.count(2) < 295


async def test_run_goes_on_when_the_lead_changes_hands(world: World) -> None:
    lists = [
        PeerList(peers=(ALICE, BOB), initial_selection=first == W, sync_window=first - 2, first_effective_window=first)
        for first in (W, W + 5)
    ]
    await world[LEADER].post_start_window(W)
    await world[LEADER].post_peer_list(lists[0])
    await world[ALICE].copy_run(horizon=0)
    assert await world[ALICE].get_start_window(ALICE) is None  # too far ahead
    await world[ALICE].copy_run(horizon=W)
    await world[LEADER].post_peer_list(lists[1])
    for uid in (ALICE, BOB, LEADER):
        await world[uid].copy_run(horizon=W)
    assert [await world[EVIL - 1].get_start_window(uid) for uid in (LEADER, ALICE, BOB, EVIL)] == [W, W, W, None]

    await world.move_lead(to=HOTKEYS["alice"].ss58_address)
    for uid in (LEADER, ALICE, BOB):
        await world[uid].refresh()
        assert world[uid].validators() == [ALICE, LEADER]
        assert await world[uid].get_start_window() == W
        found = [await world[uid].get_peer_list(window) for window in (W - 1, W, W + 4, W + 5)]
        assert found == [None, lists[0], lists[0], lists[1]]


async def test_groups_of_peers_have_their_documented_names(world: World) -> None:
    leader, bob = world[LEADER], world[BOB]
    assert (bob.peers, bob.active_peers, bob.eval_peers, bob.inactive_peers) == ((), (), (), ())
    for first in (W, W + 9):
        await leader.post_peer_list(
            PeerList(peers=(ALICE, first), initial_selection=False, sync_window=1, first_effective_window=first)
        )
    assert await bob.get_peer_list(W - 1) is None
    assert bob.peers == ()
    await bob.get_peer_list(W + 5)
    assert bob.peers == (ALICE, W)
    await bob.get_peer_list()
    assert bob.peers == (ALICE, W + 9)
    bob.update_peers_with_buckets([LEADER, ALICE, BOB])
    assert (bob.active_peers, bob.eval_peers, bob.inactive_peers) == ((LEADER, ALICE, BOB), (ALICE, BOB), ())
    bob.update_peers_with_buckets([LEADER, BOB])
    assert (bob.active_peers, bob.eval_peers, bob.inactive_peers) == ((LEADER, BOB), (BOB,), (ALICE,))


async def test_no_permit_holder_stops_or_misleads_the_start_of_a_run(
    world: World, hparams: HParams, tmp_path: Path
) -> None:
    """One names a start window that never comes; the bucket of another refuses all nodes."""
    admin = Ledger(world.chain, clock=world.clock)
    for name in ("alice", "bob"):
        admin.set_permit(HOTKEYS[name].ss58_address, True)
    admin.close()
    world.clock.advance(30 + 2 * hparams.blocks_per_window * world[LEADER].chain.block_time)  # elected then as well
    leader = world[LEADER]
    await leader.refresh()
    assert leader.validators() == [LEADER, ALICE, BOB]
    await world[ALICE].post_start_window(1_000_000)
    bucket = world.accounts[BOB].readable.name
    world.server.faults.add(f"^(GET|HEAD) /{bucket}/", Status(403, "AccessDenied"), times=None)
    following = asyncio.create_task(leader.clock.run())
    await world.clock.drive(leader.clock.wait_for_block(0), step=0.0)
    telemetry = Telemetry(role="validator", uid=LEADER, listeners=())
    context = NodeContext(comms=leader, clock=leader.clock, telemetry=telemetry)
    deciding = Leader(context, hparams.model_copy(update={"minimum_peers": 2}), tmp_path / "start").start_window()
    start = await world.clock.drive(deciding, step=0.0)
    assert start == leader.clock.window + hparams.peer_list_window_margin
    assert await leader.get_start_window() == start
    following.cancel()


async def test_a_start_window_that_never_comes_is_none(world: World, hparams: HParams) -> None:
    leader, alice = world[LEADER], world[ALICE]
    following = asyncio.create_task(alice.clock.run())
    await world.clock.drive(alice.clock.wait_for_block(0), step=0.0)
    telemetry = Telemetry(role="miner", uid=ALICE, listeners=())
    context = NodeContext(comms=alice, clock=alice.clock, telemetry=telemetry)
    await leader.post_start_window(alice.clock.window + hparams.start_horizon_windows + 1)
    with pytest.raises(PayloadError, match="is more than 100 windows ahead"):
        await published_start(context, hparams.start_horizon_windows)
    assert await published_start(context, hparams.start_horizon_windows + 1) is not None
    following.cancel()
