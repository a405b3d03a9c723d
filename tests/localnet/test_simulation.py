"""Short form of ``scripts/simulate_attackers.py``: cheats in a network with real training."""

import asyncio

import pytest

from tplr.errors import PayloadError
from tplr.localnet.attackers import Changed, Copier, Honest, Late, Malformed, Repeater, malformed
from tplr.localnet.simulation import World, profile, small

WINDOWS = 3
LAST = WINDOWS


@pytest.fixture(scope="module")
def world() -> World:
    hparams = small(profile("demo"), pages_per_window=2, evaluation_sequences=16, peer_replacement_frequency=50)
    members = [
        Honest(16),
        Honest(4),
        Changed("signs flipped", 8, lambda one, _: -one),
        Changed("scaled by 1e6", 8, lambda one, _: 1e6 * one),
        Copier("copier", 1),
        Repeater("stale repeater", 4),
        Malformed("malformed", 4),
        Late("late by one second", 4),
    ]
    world = World(hparams, members)
    asyncio.run(world.run(WINDOWS))
    return world


def struck(world: World, uid: int) -> set[str]:
    return {code for record in world.records for code in record.outcome.struck.get(uid, ())}


async def test_each_cheat_is_struck_by_its_rule_and_no_honest_miner_by_any(world: World) -> None:
    assert struck(world, 1) == struck(world, 2) == struck(world, 5) == struck(world, 6) == struck(world, 8) == set()
    assert struck(world, 4) == {"outsized"}
    assert struck(world, 7) <= {"malformed", "wrong_size"} != set()
    peer_scores = world.board.peer_scores
    assert peer_scores[3].mean < 0
    assert all(peer_scores[uid].credit == 0.0 < peer_scores[1].mean for uid in (3, 4, 7, 8))
    assert peer_scores[6].mean < peer_scores[2].mean
    assert world.held_out_loss() < (world.records[0].loss or 0.0)


def test_there_are_twenty_ways_and_each_is_refused(world: World) -> None:
    member = world.by_uid[7]
    body = Honest.body(member, world, LAST)
    assert body is not None
    assert world.parse(body, LAST, 7).uid == 7
    ways = list(malformed(body, world, 7, LAST))
    assert len(ways) == len({*ways}) == 20
    for way in ways:
        with pytest.raises(PayloadError):
            world.parse(way, LAST, 7)
