"""An update of a past window is fetched with its first bytes, from any bucket that has it."""

import asyncio
import hashlib
import time
from dataclasses import replace

import pytest
from deciding import publish_decision
from included import included_set
from three_nodes import ALICE, BOB, EVIL, HOTKEYS, LEADER, W, World

from tplr.chain.commitment import encode_commitment
from tplr.chain.local import LocalChain
from tplr.errors import ObjectNotFound, StoreUnavailable
from tplr.exchange import aggregates, agreed, first_answer
from tplr.exchange.aggregates import assemble
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.keys import decision_key, state_key
from tplr.storage import s3_store
from tplr.testing.s3server import Delay, Reset

AGGREGATE = state_key("aggregator", W, 0, "1")


def requests() -> list[asyncio.Task[None]]:
    """Return the requests for decisions that run."""
    return [task for task in asyncio.all_tasks() if "DecisionReader._ask" in repr(task.get_coro())]


async def test_the_start_of_an_update_comes_from_whoever_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its aggregate, else from its miner's bucket; two that hang are given up, one after the other."""
    leader, alice, bob = world.nodes
    monkeypatch.setattr(bob, "_hparams", bob._hparams.model_copy(update={"gather_patience_seconds": 1.0}))
    await world.pass_window()
    body = b"an update"
    update = GatheredUpdate(ALICE, None, hashlib.sha256(body).hexdigest(), len(body))
    included = included_set(GatherResult(window=W, updates=(update,), skipped={}), "1")
    await publish_decision([leader], included)
    with pytest.raises(ObjectNotFound):
        await bob.get_update_start(W, ALICE, 5)
    await alice.put_update(W, body)
    assert await bob.get_update_start(W, ALICE, 5) == b"an up"  # of the miner
    assert await bob.get_update_start(W, ALICE, len(body)) == body
    await leader.put_aggregate(included, assemble(included, [b"the words"]))
    assert await bob.get_update_start(W, ALICE, 3) == b"the"  # of the aggregate
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 2.0)
    world.server.faults.add(f"^GET .*{AGGREGATE}", Delay(3600), times=None)
    assert await bob.get_update_start(W, ALICE, 3) == b"an "
    world.server.faults.add("^GET .*gradient-", Delay(3600), times=None)
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"window {W}: the update of uid {ALICE} is in no bucket that answers"):
        await bob.get_update_start(W, ALICE, 3)
    assert 1.0 < time.monotonic() - began < 3.0


async def test_an_aggregate_that_hangs_may_hold_a_deleted_update(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(world[BOB], "_hparams", world[BOB]._hparams.model_copy(update={"gather_patience_seconds": 0.1}))
    await world.pass_window()
    update = GatheredUpdate(ALICE, None, hashlib.sha256(b"").hexdigest(), 0)
    included = included_set(GatherResult(window=W, updates=(update,), skipped={}), "1")
    await publish_decision([world[LEADER]], included)
    world.server.faults.add(f"^GET .*{AGGREGATE}", Delay(3600), times=None)
    with pytest.raises(StoreUnavailable):
        await world[BOB].get_update_start(W, ALICE, 3)


async def test_if_the_miner_s_bucket_hangs_its_update_comes_from_any_validator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading validator has no aggregate: from the miner at a second attempt, or from another validator."""
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.5)
    leader, alice, bob = world.nodes
    await world.pass_window()
    body = b"an update"
    update = GatheredUpdate(ALICE, None, hashlib.sha256(body).hexdigest(), len(body))
    included = included_set(GatherResult(window=W, updates=(update,), skipped={}), "1")
    await publish_decision([leader], included)
    assert await bob.get_included(W) == included
    await alice.put_update(W, body)
    world.server.faults.add("^GET .*gradient-", Delay(3600), times=1)
    assert await bob.get_update_start(W, ALICE, 5) == b"an up"
    await leader.put_aggregate(included, assemble(included, [body]))
    await world.move_lead(to=HOTKEYS["bob"].ss58_address)
    await bob.refresh()
    assert bob.highest_stake_validator() == BOB
    world.server.faults.add("^GET .*gradient-", Delay(3600), times=None)
    assert await bob.get_update_start(W, ALICE, 5) == b"an up"


async def test_an_aggregate_larger_than_a_put_goes_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 updates of a model of 70 billion parameters are 15 GB, and a PUT takes 5."""
    for module in (aggregates, s3_store):
        monkeypatch.setattr(module, "MAX_PUT_BYTES", 2**25, raising=False)
    leader, _, bob = world.nodes
    body = bytes(2**25 + 1)
    update = GatheredUpdate(ALICE, None, hashlib.sha256(body).hexdigest(), len(body))
    included = included_set(GatherResult(window=W, updates=(update,), skipped={}), "1")
    await leader.put_aggregate(included, assemble(included, [body]))
    assert (await leader.own_store.head(AGGREGATE)).in_parts
    assert await bob.get_aggregate(included) == [body]


async def test_a_copied_account_id_hides_no_bucket(world: World) -> None:
    """A validator of more stake commits the account id of another one, with a wrong key."""
    leader, _, bob = world.nodes
    await world.pass_window()
    body = b"an update"
    update = GatheredUpdate(ALICE, None, hashlib.sha256(body).hexdigest(), len(body))
    included = included_set(GatherResult(window=W, updates=(update,), skipped={}), "1")
    await publish_decision([leader], included)
    assert await bob.get_included(W) == included
    await leader.put_aggregate(included, assemble(included, [body]))
    honest = bob.get_bucket(LEADER)
    assert honest is not None
    copied = replace(honest, secret_access_key="0" * 64)
    async with LocalChain(world.chain, HOTKEYS["evil"], clock=world.clock) as chain:
        await world.clock.drive(chain.commit(encode_commitment(copied)), step=1.0)
    await world.move_lead(to=HOTKEYS["evil"].ss58_address)
    await bob.refresh()
    assert bob.highest_stake_validator() == EVIL
    assert await bob.get_aggregate(included) == [body]
    requests = bob._connections.results.total()
    assert await bob.get_aggregate(included) == [body]
    assert bob._connections.results.total() == requests + 2  # only the honest bucket is asked, by HEAD and GET
    world.server.faults.add("^GET .*gradient-", Reset(), times=None)
    assert await bob.get_update_start(W, ALICE, 5) == b"an up"


async def test_a_decision_is_read_from_the_bucket_that_an_elector_has_by_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node looked for it first, and then its directory of buckets was refreshed."""
    await world.pass_window()
    leader, bob = world[LEADER], world[BOB]
    included = included_set(GatherResult(window=W, updates=(), skipped={}), "1")
    await publish_decision([leader], included)
    with monkeypatch.context() as patch:
        patch.setattr(bob, "commitments", {**bob.commitments, LEADER: bob.commitments[ALICE]})
        assert await bob.get_included(W) is None
    assert await bob.get_included(W) == included


async def test_a_decision_in_a_slow_bucket_is_read_by_who_looks_again(world: World) -> None:
    """Each look ends in time for the next poll, but does not abandon the request."""
    await world.pass_window()
    bob, included = world[BOB], included_set(GatherResult(window=W, updates=(), skipped={}), "1")
    await publish_decision([world[LEADER]], included)
    world.server.faults.add(f"^GET .*{decision_key(W, '1')}", Delay(agreed.PATIENCE_SECONDS + 0.5), times=None)
    began = time.monotonic()
    assert await bob.get_included(W) is None
    assert time.monotonic() - began < agreed.PATIENCE_SECONDS + 0.4
    assert await bob.get_included(W) == included
    assert time.monotonic() - began < agreed.PATIENCE_SECONDS + 1.0


async def test_a_cancelled_look_leaves_no_request(world: World) -> None:
    await world.pass_window()
    await publish_decision([world[LEADER]], included_set(GatherResult(window=W, updates=(), skipped={}), "1"))
    world.server.faults.add(f"^GET .*{decision_key(W, '1')}", Delay(3600), times=None)
    look = asyncio.create_task(world[BOB].get_included(W))
    await asyncio.sleep(agreed.PATIENCE_SECONDS / 2)
    asked = requests()
    look.cancel()
    await asyncio.sleep(0.2)
    assert asked
    assert all(task.done() for task in asked)


async def test_a_look_that_ends_leaves_the_requests_that_another_waits_for(world: World) -> None:
    """Whether it is cancelled, or has found the decision while a later look asks again."""
    await world.pass_window()
    bob, included = world[BOB], included_set(GatherResult(window=W, updates=(), skipped={}), "1")
    await publish_decision([world[LEADER]], included)
    world.server.faults.add(f"^GET .*{decision_key(W, '1')}", Delay(agreed.PATIENCE_SECONDS / 2), times=None)
    looks = [asyncio.create_task(bob.get_included(W)) for _ in range(3)]
    await asyncio.sleep(agreed.PATIENCE_SECONDS / 4)
    assert len(requests()) == 1
    looks[0].cancel()
    assert await asyncio.gather(*looks[1:]) == [included] * 2
    assert not requests()


async def test_who_looks_just_when_another_has_found_the_decision_finds_it_too(world: World) -> None:
    await world.pass_window()
    included = included_set(GatherResult(window=W, updates=(), skipped={}), "1")
    await publish_decision([world[LEADER]], included)
    reader = await world[BOB]._decision_reader(W)
    first = asyncio.create_task(reader.look())
    while not reader._seen:  # noqa: ASYNC110 - the step of the loop between the request's end and the caller's
        await asyncio.sleep(0)
    values = await asyncio.gather(reader.look(), first)
    assert [value.included for value in values if value] == [included] * 2


async def test_a_bucket_that_never_answers_delays_each_look_and_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(agreed, "DECISION_SECONDS", 0.5)
    await world.pass_window()
    bob, included = world[BOB], included_set(GatherResult(window=W, updates=(), skipped={}), "1")
    await publish_decision([world[LEADER]], included)
    world.server.faults.add(f"^GET .*{decision_key(W, '1')}", Delay(3600), times=1)
    looks = [await bob.get_included(W) for _ in range(4)]
    assert looks[:2] == [None, None]
    assert looks[3] == included
