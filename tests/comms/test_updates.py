"""Packed updates are gathered with their commits, by the rules of a run."""

import asyncio
import hashlib

import torch
from three_nodes import ALICE, BOB, EVIL, LEADER, W, World

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import build
from tplr.exchange import updates
from tplr.hparams import HParams
from tplr.keys import commit_key
from tplr.schemas import Reason


async def test_updates_are_gathered_with_their_commits(world: World) -> None:
    """Alice commits in time and uploads in time; Bob commits to other bytes; the leader does not commit."""
    alice, bob, leader = world[ALICE], world[BOB], world[LEADER]
    window = alice.block_to_window(await alice.chain.head())
    spec = PayloadSpec.of({"w": (4,)}, outer="demo", target_chunk=4, topk=4, bits=0)
    sent = {"w": (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4))}
    body = build(sent, spec, window=window, uid=ALICE, pages_digest="0" * 64, batches=1)
    await alice.put_commit(window, hashlib.sha256(body).hexdigest())
    await bob.put_commit(window, hashlib.sha256(b"other").hexdigest())
    while alice.block_to_window(await alice.chain.head()) == window:
        world.clock.advance(1)
    for comms in (alice, bob, leader):
        await comms.put_update(window, body)

    world.clock.advance(100)  # the bound has long passed
    following = asyncio.create_task(leader.clock.run())
    await leader.clock.wait_for_window(window + 1)
    found = await world.clock.drive(leader.gather_updates(range(4), window, spec), step=0.0)
    following.cancel()
    assert [(one.update.body, one.update.uid) for one in found.updates] == [(body, ALICE)]
    assert found.skipped == {LEADER: Reason.NO_COMMIT, BOB: Reason.HASH_MISMATCH, EVIL: Reason.NO_BUCKET}


def test_update_rules_wait_for_the_bound_and_the_store_s_clock(hparams: HParams) -> None:
    bounds = updates.UploadBounds(1000.0, 1004.0)
    spec = PayloadSpec.of({"w": (4,)}, outer="demo", target_chunk=4, topk=4, bits=0)
    rules = updates.UpdateRules.of(W, bounds, hparams, spec, ended_ago=1.0, patient=True)
    assert rules.closes_in == 4.0 - 1.0 + updates.STORE_CLOCK_SECONDS
    assert rules.patience == hparams.gather_patience_seconds
    assert updates.UpdateRules.of(W, bounds, hparams, spec, ended_ago=1.0).patience == 0  # no wait for absent peers
    assert rules.commit_key(ALICE) == commit_key(W, ALICE, hparams.version)
    trusting = hparams.model_copy(update={"require_commit": False})
    assert updates.UpdateRules.of(W, bounds, trusting, spec, ended_ago=1.0).commit_key(ALICE) is None
