"""Three nodes with their buckets on one server and one chain: what one publishes through ``Comms``, the others find."""

import asyncio
import contextlib
import hashlib
import pickle
import re
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bittensor.wallet import Wallet
from bittensor_core import Keypair
from deciding import publish_decision

import tplr
from tplr.chain.clocks import ManualClock
from tplr.chain.commitment import encode_commitment
from tplr.chain.hotkeys import save_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import build
from tplr.errors import (
    AccessDenied,
    ConfigError,
    ObjectNotFound,
    ObjectTooLarge,
    PayloadError,
    PreconditionFailed,
    StoreUnavailable,
)
from tplr.exchange import first_answer, state_objects, updates
from tplr.exchange.activity import PeerGroups
from tplr.exchange.aggregates import bundle, included_set
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.exchange.snapshot import ShardWriter, SnapshotManifest, TensorLayout, write_manifest
from tplr.hparams import HParams
from tplr.keys import commit_key, gradient_key, state_key
from tplr.localnet.accounts import Account, bucket_variables, key_table, new_account
from tplr.localnet.plan import scheme_constants
from tplr.node.leader import Leader, published_start
from tplr.node.replica import NodeContext
from tplr.schemas import PeerList, Reason
from tplr.storage import S3Connections, S3Store
from tplr.storage.s3_multipart import S3Multipart
from tplr.telemetry import Telemetry
from tplr.testing.s3server import Delay, FlipBit, LoseResponse, Rules, Server, Status, serve
from tplr.training.model import build_model

NAMES = ("leader", "alice", "bob")
HOTKEYS = {name: Keypair.create_from_uri(f"//{name}") for name in (*NAMES, "evil")}
LEADER, ALICE, BOB, EVIL = range(4)
STATE = {"widxs": torch.tensor([[1, 5]]), "wvals": torch.tensor([[0.5, -0.5]]), "metadata": {"pages": [1, 2]}}
W = 10  # a window
AGGREGATE = state_key("aggregator", W, 0, "1")
WAIT = 3.0  # seconds until a gather gives up what is wrong and may still be replaced


@pytest.fixture(scope="module")
def hparams() -> HParams:
    changes = {"gradient_retention_windows": 5, "topk_compression": 2}
    return HParams.model_validate(scheme_constants("demo")).model_copy(update=changes)


class World:
    """One ``Comms`` for each of ``NAMES``, in virtual time of chain and storage; uid 3 committed to no bucket."""

    clock: ManualClock
    chain: Path
    server: Server
    nodes: list[Comms]
    accounts: list[Account]
    common: Account

    def __getitem__(self, uid: int) -> Comms:
        return self.nodes[uid]

    async def move_lead(self, *, to: str) -> None:
        """Give ``to`` a permit and more stake than anybody has."""
        admin = Ledger(self.chain, clock=self.clock)
        admin.set_stake(to, 1e9)
        admin.set_permit(to, True)
        admin.close()
        self.clock.advance(30)

    async def pass_window(self) -> None:
        """Let window ``W`` pass; the nodes see it."""
        leader = self[LEADER]
        self.clock.advance((W + 2) * leader.blocks_per_window * leader.chain.block_time)
        for comms in self.nodes:
            following = asyncio.create_task(comms.clock.run())
            await self.clock.drive(comms.clock.wait_for_window(W + 1), step=0.0)
            following.cancel()

    async def keys(self, uid: int) -> list[str]:
        return [info.key for info in await self.nodes[uid].own_store.list()]


@pytest.fixture
async def world(tmp_path: Path, hparams: HParams) -> AsyncIterator[World]:
    made = World()
    made.clock = ManualClock()
    made.accounts = [new_account() for _ in NAMES]
    made.common = new_account("common")
    path = made.chain = tmp_path / "chain.db"
    Ledger.create(path, clock=made.clock, finality_lag=0)
    admin = Ledger(path, clock=made.clock)
    for name in (*NAMES, "evil"):
        admin.register(
            HOTKEYS[name].ss58_address, f"cold-{name}", stake=1e6 if name == "leader" else 1.0, permit=name == "leader"
        )
    admin.close()
    rules = Rules(one_write_per_second=False, max_clock_skew=1e12)
    async with contextlib.AsyncExitStack() as stack:
        serving = serve(tmp_path / "s3", key_table([*made.accounts, made.common]), rules=rules, clock=made.clock.now)
        made.server = await stack.enter_async_context(serving)
        evil = await stack.enter_async_context(LocalChain(path, HOTKEYS["evil"], clock=made.clock))
        await made.clock.drive(evil.commit("127.0.0.1:9000/".ljust(128, "0")))
        made.nodes = []
        for name, account in zip(NAMES, made.accounts, strict=True):
            chain = await stack.enter_async_context(LocalChain(path, HOTKEYS[name], clock=made.clock))
            await made.clock.drive(chain.commit(encode_commitment(account.readable)))
            connections = await stack.enter_async_context(S3Connections(made.server.endpoint))
            made.nodes.append(Comms(chain, hparams, connections, own_bucket=account.writable, folder=tmp_path / name))
        for comms in made.nodes:
            await comms.refresh()
        yield made


@pytest.mark.parametrize("local", [True, False])
async def test_put_and_get(world: World, local: bool) -> None:
    alice, bob = world[ALICE], world[ALICE if local else BOB]
    written = await alice.put(STATE, ALICE, W, "gradient", 7, local=local)
    store = alice.local_store(ALICE) if local else alice.own_store
    assert written == (await store.head(state_key("gradient", W, ALICE, "1"))).last_modified
    state, step = await bob.get(ALICE, W, "gradient", local=local)
    assert step == 7
    assert state.keys() == STATE.keys()
    assert torch.equal(state["wvals"], STATE["wvals"])
    assert state["metadata"] == {"pages": [1, 2]}
    waited = await bob.get_with_retry(ALICE, W, "gradient", 20, local=local)
    assert waited is not None
    assert waited.global_step == 7
    with pytest.raises(ObjectNotFound):
        await bob.get(ALICE, W + 1, "gradient", local=local)
    assert await bob.get_with_retry(ALICE, W + 1, "gradient", 0.1, local=local) is None


async def test_get_without_a_bucket(world: World) -> None:
    with pytest.raises(ObjectNotFound, match="uid 3 has committed to no bucket"):
        await world[BOB].get(EVIL, W, "gradient", local=False)


@pytest.mark.parametrize("local", [True, False])
async def test_put_removes_what_is_stale(world: World, local: bool) -> None:
    alice = world[ALICE]
    store = alice.local_store(ALICE) if local else alice.own_store
    for window in (1, 2, 3, W):
        await alice.put(STATE, None, window, "checkpoint", local=local, stale_retention=8)
    await alice.put(STATE, None, W, "debug", local=local)
    left = [info.key for info in await store.list()]
    kept = [state_key("checkpoint", window, ALICE, "1") for window in (W, 2, 3)]
    assert left == [*kept, state_key("debug", W, ALICE, "1")]


async def test_get_removes_stale_local_data_only(world: World) -> None:
    alice = world[ALICE]
    for local in (True, False):
        for window in (1, W):
            await alice.put(STATE, ALICE, window, "gradient", local=local, stale_retention=99)
    await alice.get(ALICE, W, "gradient", stale_retention=5)
    assert [info.key for info in await alice.local_store(ALICE).list()] == [state_key("gradient", W, ALICE, "1")]
    assert len(await world.keys(ALICE)) == 2


async def test_gather(world: World) -> None:
    opened = datetime.fromtimestamp(world.clock.now(), UTC)
    for uid in (LEADER, ALICE):
        await world[uid].put(STATE, uid, W, "gradient", uid + 100, local=False)
    await world[BOB].own_store.put(state_key("gradient", W, BOB, "1"), pickle.dumps(STATE))
    size = (await world[ALICE].own_store.head(state_key("gradient", W, ALICE, "1"))).size
    found = await world[ALICE].gather(
        ALICE, [BOB, EVIL, ALICE, LEADER], W, "gradient", WAIT, device="cpu", totalks={"w": 6}, local=False,
        time_min=opened, time_max=opened,
    )  # fmt: skip
    assert found.uids == (LEADER, ALICE)
    assert found.global_steps == (100, 101)
    assert found.skipped_uids == {BOB: Reason.MALFORMED, EVIL: Reason.NO_BUCKET}
    assert found.success_rate == 0.5
    assert (found.upload_bytes, found.download_bytes) == (size, 2 * size)
    assert 0 < found.time < 20 * WAIT
    assert found.state_dict.keys() == STATE.keys()
    assert all(torch.equal(tensor, STATE["widxs"]) for tensor in found.state_dict["widxs"])
    assert all(torch.allclose(tensor, torch.tensor([[0.5, -0.5]]) * 2**0.5) for tensor in found.state_dict["wvals"])
    again = await world[ALICE].gather(None, [], W, "gradient", WAIT, device="cpu", totalks=None)
    assert (again.upload_bytes, again.success_rate, again.state_dict) == (0, 0.0, {})


def pair(values: list[float], indices: list[int] | None = None) -> dict[str, torch.Tensor]:
    """The coefficients of a parameter ``w``, in one row."""
    return {"widxs": torch.tensor([indices or [*range(len(values))]]), "wvals": torch.tensor([values])}


@pytest.mark.parametrize("totalks", [{"w": 8}, None])
async def test_gather_gives_every_peer_unit_norm(world: World, totalks: dict[str, int] | None) -> None:
    """However large its values are: a peer can't scale itself up."""
    for uid, values in ((LEADER, [10.0, 20.0, 20.0]), (ALICE, [3e38, 0.0, -3e38]), (BOB, [0.0, 0.0, 0.0])):
        world[uid]._hparams = world[uid]._hparams.model_copy(update={"topk_compression": 3})
        others = {} if totalks else {"other": torch.tensor(9.0)}
        await world[uid].put(pair(values) | others, uid, W, "gradient", local=False)
    found = await world[BOB].gather(
        BOB, [LEADER, ALICE, BOB], W, "gradient", 5, device="cpu", totalks=totalks, local=False
    )
    expected = [[1 / 3, 2 / 3, 2 / 3], [0.5**0.5, 0.0, -(0.5**0.5)], [0.0, 0.0, 0.0]]
    assert torch.allclose(torch.cat(found.state_dict["wvals"]), torch.tensor(expected))
    assert found.state_dict.get("other", []) == ([] if totalks else [9.0] * 3)
    state, _ = await world[BOB].get(LEADER, W, "gradient", local=False)
    assert state["wvals"].tolist() == [[10.0, 20.0, 20.0]]


@pytest.mark.parametrize(
    ("values", "indices", "totalk", "counts"),
    [
        ([1.0, 2.0], [0, 5], 6, True),
        ([1.0], [5], 6, False),
        ([1.0, 2.0, 3.0], [0, 1, 5], 6, False),
        ([1.0], [0], 1, True),
        ([1.0, 2.0], [0, 1], 1, False),
    ],
)
async def test_gather_takes_the_documented_number_of_indices(
    world: World, values: list[float], indices: list[int], totalk: int, counts: bool
) -> None:
    """``min(topk_compression, totalk)``: here 2, or fewer where there are not as many."""
    await world[ALICE].put(pair(values, indices), ALICE, W, "gradient", local=False)
    found = await world[BOB].gather(BOB, [ALICE], W, "gradient", 0.1, device="cpu", totalks={"w": totalk}, local=False)
    assert found.skipped_uids == ({} if counts else {ALICE: Reason.MALFORMED})


async def test_reads_survive_a_store_that_is_unavailable_for_a_moment(world: World) -> None:
    leader, alice, bob = (world[uid] for uid in (LEADER, ALICE, BOB))
    lists = PeerList(peers=(ALICE,), initial_selection=True, sync_window=1, first_effective_window=W)
    await leader.post_start_window(W)
    await leader.post_peer_list(lists)
    await alice.put(STATE, ALICE, W, "gradient", 7, local=False)
    for pattern in ("^HEAD ", "^GET .*gradient", "^GET .*start_window", "^GET .*peers_", "^GET .*list-type"):
        world.server.faults.add(pattern, Status(503, "SlowDown"), times=2)
    assert (await bob.get(ALICE, W, "gradient", local=False)).global_step == 7
    assert await bob.get_start_window() == W
    assert await bob.get_peer_list() == lists
    world.server.faults.add("^GET .*list-type", Status(503, "SlowDown"), times=1)
    assert await bob.get_latest_checkpoint() is None
    world.server.faults.add("^GET .*list-type", Status(503, "SlowDown"), times=1)
    await alice.put(STATE, ALICE, W + 20, "gradient", local=False)
    assert await world.keys(ALICE) == [state_key("gradient", W + 20, ALICE, "1")]


async def test_get_within_time_bounds(world: World) -> None:
    before = datetime.fromtimestamp(world.clock.now() - 9, UTC)
    written = await world[ALICE].put(STATE, ALICE, W, "gradient", 7, local=False)
    at, after = (datetime.fromtimestamp(written + late, UTC) for late in (0, 9))
    get = partial(world[BOB].get, ALICE, W, "gradient", local=False)
    for bounds in ({"time_min": before}, {"time_max": after}, {"time_min": at, "time_max": at.replace(tzinfo=None)}):
        assert (await get(**bounds)).global_step == 7
    with pytest.raises(ObjectNotFound, match="too_early: written at"):
        await get(time_min=after)
    with pytest.raises(ObjectNotFound, match="too_late: written at"):
        await get(time_max=before)


@pytest.mark.parametrize(
    ("uid", "window", "key", "message"),
    [
        (ALICE, W, "grad", "key 'grad': expected one of gradient, checkpoint, debug, aggregator"),
        ("0", W, "gradient", "uid '0': expected an integer from 0 to 65535"),
        ("../../x", W, "gradient", "uid '../../x'"),
        (-1, W, "gradient", "uid -1"),
        (65536, W, "gradient", "uid 65536"),
        (True, W, "gradient", "uid True"),
        (ALICE, -1, "gradient", "window -1: expected an integer from 0 to"),
        (ALICE, 10**15, "gradient", "window 1000000000000000"),
        (ALICE, "3", "gradient", "window '3'"),
    ],
)
async def test_names_that_no_clean_up_would_find_are_refused(
    world: World, tmp_path: Path, uid: Any, window: Any, key: Any, message: str
) -> None:
    alice = world[ALICE]
    for local in (True, False):
        calls = [
            alice.put(STATE, uid, window, key, local=local),
            alice.get(uid, window, key, local=local),
            alice.get_with_retry(uid, window, key, 0.1, local=local),
            alice.gather(None, [uid], window, key, 0.1, device="cpu", totalks=None, local=local),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(message)):
                await call
    assert await world.keys(ALICE) == []
    assert not (tmp_path / "alice").exists()


@pytest.mark.parametrize("local", [True, False])
async def test_a_large_state_goes_in_parts(world: World, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    monkeypatch.setattr(state_objects, "ONE_PUT_BYTES", 2**20)
    monkeypatch.setattr("tplr.storage.base.MAX_PUT_BYTES", 2**25)  # what one PUT to a bucket carries
    large = {"a": torch.arange(10 * 2**20, dtype=torch.float32), "note": "large"}  # 40 MiB
    alice, bob = world[ALICE], world[ALICE if local else BOB]
    bob.max_state_bytes = 2**26
    seen: list[str] = []
    monkeypatch.setattr(world.server.faults, "take", lambda method, target: seen.append(f"{method} {target}"))
    written = await alice.put(large, ALICE, W, "checkpoint", 7, local=local)
    monkeypatch.undo()
    info = await (alice.local_store(ALICE) if local else alice.own_store).head(state_key("checkpoint", W, ALICE, "1"))
    assert (info.last_modified, "-" in info.etag) == (written, not local)
    assert len([one for one in seen if one.startswith("PUT ")]) == (0 if local else 3)
    # Damage on the way is found, though the store can't check an ETag of parts.
    world.server.faults.add("^GET .*checkpoint", FlipBit(30_000_000))
    state, step = await bob.get(ALICE, W, "checkpoint", local=local)
    assert (step, state["note"]) == (7, "large")
    assert torch.equal(state["a"], large["a"])
    found = await bob.gather(None, [ALICE], W, "checkpoint", 9, device="cpu", totalks=None, local=local)
    assert found.global_steps == (7,)
    timed = await bob.gather(
        None, [ALICE], W, "checkpoint", 0.1, device="cpu", totalks=None, local=local,
        time_min=datetime.fromtimestamp(0, UTC),
    )  # fmt: skip
    assert timed.skipped_uids == ({} if local else {ALICE: Reason.MALFORMED})


async def test_gather_judges_by_the_store_s_clock(world: World) -> None:
    for uid in (LEADER, ALICE, BOB):
        await world[uid].put(STATE, uid, W, "gradient", local=False)
        world.clock.advance(100)
    bounds = [datetime.fromtimestamp(world.clock.now() - before, UTC) for before in (250, 150)]
    found = await world[BOB].gather(
        BOB, range(3), W, "gradient", WAIT, device="cpu", totalks=None, local=False,
        time_min=bounds[0], time_max=bounds[1].replace(tzinfo=None),
    )  # fmt: skip
    assert found.uids == (ALICE,)
    assert found.skipped_uids == {LEADER: Reason.TOO_EARLY, BOB: Reason.TOO_LATE}


async def test_gather_from_a_folder(world: World) -> None:
    bob = world[BOB]
    for uid in (4, 5):
        await bob.put(STATE | {"only": uid} if uid == 5 else STATE, uid, W, "debug", uid)
    found = await bob.gather(BOB, [4, 5, 6], W, "debug", 0.1, device="cpu", totalks=None)
    assert found.uids == (4, 5)
    assert found.skipped_uids == {6: Reason.MISSING}
    assert found.state_dict["only"] == [None, 5]


async def test_own_state_is_read_with_the_own_credential(world: World) -> None:
    """Also when the chain's, readable by all, does not work."""
    alice = world[ALICE]
    await alice.put(STATE, ALICE, W, "gradient", local=False)
    without = key_table(world.accounts)
    del without[world.accounts[ALICE].readable.access_key_id]
    world.server.keys.replace(without)
    for my_uid, skipped in ((ALICE, {}), (None, {ALICE: Reason.DENIED})):
        found = await alice.gather(my_uid, [ALICE], W, "gradient", 0.1, device="cpu", totalks=None, local=False)
        assert found.skipped_uids == skipped
    with pytest.raises(AccessDenied):
        await world[BOB].get(ALICE, W, "gradient", local=False)


async def test_states_are_never_larger_than_the_model_explains(world: World, hparams: HParams) -> None:
    parameters = sum(parameter.numel() for parameter in build_model(hparams).parameters())
    assert world[BOB].max_state_bytes == 12 * parameters + 2**20
    world[BOB].max_state_bytes = 1000
    await world[ALICE].put({"a": torch.zeros(300)}, ALICE, W, "gradient", local=False)
    with pytest.raises(ObjectTooLarge):
        await world[BOB].get(ALICE, W, "gradient", local=False)
    found = await world[BOB].gather(BOB, [ALICE], W, "gradient", WAIT, device="cpu", totalks=None, local=False)
    assert found.skipped_uids == {ALICE: Reason.WRONG_SIZE}


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


async def test_the_start_of_an_update_comes_from_whoever_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its aggregate, else from its miner's bucket; two that hang are given up, one after the other."""
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 1.0)
    leader, alice, bob = world.nodes
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
    await leader.put_aggregate(included, bundle(included, [b"the words"]))
    assert await bob.get_update_start(W, ALICE, 3) == b"the"  # of the aggregate
    world.server.faults.add(f"^GET .*{AGGREGATE}", Delay(3600), times=None)
    assert await bob.get_update_start(W, ALICE, 3) == b"an "
    world.server.faults.add("^GET .*gradient-", Delay(3600), times=None)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
        await bob.get_update_start(W, ALICE, 3)
    assert time.monotonic() - began < 2 * first_answer.ANSWER_SECONDS + 2


async def test_an_aggregate_that_hangs_may_hold_a_deleted_update(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.5)
    await world.pass_window()
    update = GatheredUpdate(ALICE, None, hashlib.sha256(b"").hexdigest(), 0)
    included = included_set(GatherResult(window=W, updates=(update,), skipped={}), "1")
    await publish_decision([world[LEADER]], included)
    world.server.faults.add(f"^GET .*{AGGREGATE}", Delay(3600), times=None)
    with pytest.raises(StoreUnavailable):
        await world[BOB].get_update_start(W, ALICE, 3)


def test_update_rules_wait_for_the_bound_and_the_store_s_clock(hparams: HParams) -> None:
    bounds = updates.UploadBounds(1000.0, 1004.0)
    spec = PayloadSpec.of({"w": (4,)}, outer="demo", target_chunk=4, topk=4, bits=0)
    rules = updates.UpdateRules.of(W, bounds, hparams, spec, ended_ago=1.0, patient=True)
    assert rules.closes_in == 4.0 - 1.0 + updates.STORE_CLOCK_SECONDS
    assert rules.patience == hparams.gather_patience_seconds
    assert updates.UpdateRules.of(W, bounds, hparams, spec, ended_ago=1.0).patience == 0  # nobody waits for the dead
    assert rules.commit_key(ALICE) == commit_key(W, ALICE, hparams.version)
    trusting = hparams.model_copy(update={"require_commit": False})
    assert updates.UpdateRules.of(W, bounds, trusting, spec, ended_ago=1.0).commit_key(ALICE) is None


async def test_the_leader_s_documents(world: World) -> None:
    leader, bob = world[LEADER], world[BOB]
    assert await bob.get_start_window() is None
    assert await bob.get_peer_list() is None
    # The answer to the first attempt is lost: the second meets what the first one wrote.
    world.server.faults.add("^PUT .*start_window", LoseResponse(), times=2)
    world.server.faults.add("^PUT .*peers_", LoseResponse(), times=2)
    await leader.post_start_window(7)
    for first in (7, 20):
        await leader.post_peer_list(
            PeerList(peers=(first,), initial_selection=False, sync_window=3, first_effective_window=first)
        )
    await world[ALICE].post_start_window(99)  # nobody asks her
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


async def test_checkpoints_may_have_a_bucket_of_their_own(world: World, hparams: HParams, tmp_path: Path) -> None:
    def snapshot(window: int) -> Path:
        writer = ShardWriter(tmp_path / str(window))
        writer.write({"model.a": torch.ones(3)})
        manifest = SnapshotManifest(
            window=window,
            start_window=0,
            global_step=window,
            version=hparams.version,
            values={},
            tensors=writer.tensors,
            shards=tuple(writer.shards),
        )
        write_manifest(tmp_path / str(window), manifest)
        return tmp_path / str(window)

    leader, miner = world[0], world[1]
    assert await miner.get_latest_checkpoint() is None
    await leader.publish_checkpoint(snapshot(7))
    await miner.publish_checkpoint(snapshot(9))
    await miner.publish_checkpoint(snapshot(10), local=True)
    found = [(one.window, one.uid) for one in await miner.checkpoints()]
    # The leading validator's first, then those in the own bucket, then those on this machine.
    assert found == [(7, leader.uid), (9, miner.uid), (10, miner.uid)]
    assert [(one.window, one.uid) for one in await leader.checkpoints()] == [(7, leader.uid)]

    # A bucket that is away hides no other place; but which checkpoint is the first can't be told without it.
    fault = world.server.faults.add(rf"^GET /{world.accounts[0].name}\?", Status(403, "AccessDenied"), times=None)
    assert [(one.window, one.uid) for one in await miner.checkpoints()] == [(9, miner.uid), (10, miner.uid)]
    with pytest.raises(AccessDenied):
        await miner.get_latest_checkpoint()
    fault.left = 0

    assert [store.name for store in leader.own_stores] == [world.accounts[0].name]
    leader._checkpoints = miner._checkpoints = leader._connections.store(world.common.writable)
    # Both are tidied when the node starts: what a killed node left half uploaded lies where its checkpoints go.
    assert [store.name for store in leader.own_stores] == [world.accounts[0].name, "common"]
    await leader.publish_checkpoint(snapshot(8))
    latest = await miner.get_latest_checkpoint()
    assert latest is not None
    assert (latest.window, latest.uid, latest.store.name) == (8, leader.uid, "common")
    assert not [key for key in await world.keys(leader.uid) if key.startswith("checkpoint-8-")]
    fetched = await miner.fetch_checkpoint(latest, tmp_path / "got", {"model.a": TensorLayout.of(torch.ones(3))})
    assert fetched.window == 8

    # Newest first, also of those that lie in two places.
    leader._checkpoints = None
    await leader.publish_checkpoint(snapshot(11))
    assert [one.window for one in await miner.leaders_checkpoints()] == [11, 8, 7]
    assert [one.window for one in await miner.checkpoints()][:3] == [11, 8, 7]


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
        # A clean-up that fails ends nothing: the next window has another.
        world.server.faults.add("^DELETE ", Status(403, "AccessDenied"), times=1)
        async with asyncio.timeout(20):
            await world.clock.drive(gone(), step=12.0)
        for loop in loops:
            loop.cancel()


async def test_weighted_sample(world: World) -> None:
    alice = world[ALICE]
    drawn = alice.weighted_random_sample_no_replacement([1, 2, 3, 4], [1.0, 0.0, 5.0, 1.0], 3)
    assert sorted(drawn) == [1, 3, 4]
    firsts = [alice.weighted_random_sample_no_replacement([1, 2], [1, 9], 1, seed=seed)[0] for seed in range(300)]
    assert 240 < firsts.count(2) < 295


async def test_own_buckets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    account = world.accounts[ALICE]
    for name, value in bucket_variables("gradients", account, "read", "write").items():
        monkeypatch.setenv(name, value)
    assert world[ALICE].get_own_bucket("gradients", "write") == account.writable
    assert world[ALICE].get_own_bucket("gradients") == world[BOB].get_bucket(ALICE) == account.readable


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


@pytest.fixture
async def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A process whose environment names a bucket and a folder, and a wallet that is registered on a chain in a file.

    Yields the chain's file. The working directory is empty.
    """
    account, path = new_account(), tmp_path / "chain.db"
    Ledger.create(path, netuid=7, block_time=0.2, finality_lag=0)
    admin = Ledger(path)
    admin.register(HOTKEYS["alice"].ss58_address, "cold", stake=2.0, permit=True)
    admin.close()
    save_hotkey(tmp_path / "wallets", "owner", "alice", HOTKEYS["alice"])
    async with LocalChain(path, HOTKEYS["alice"]) as chain:
        await chain.commit(encode_commitment(account.readable))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd" / ".env").touch()  # ends the search for another one
    async with serve(tmp_path / "s3", key_table([account])) as server:
        variables = bucket_variables("gradients", account, "read", "write") | {"TPLR_S3_ENDPOINT": server.endpoint}
        for name, value in (variables | {"TPLR_CACHE_FOLDER": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        yield path


async def test_from_the_environment(alone: Path, hparams: HParams, caplog: pytest.LogCaptureFixture) -> None:
    wallet = Wallet("owner", "alice", str(alone.parent / "wallets"))
    caplog.set_level("INFO")
    async with tplr.Comms.from_env(hparams, wallet=wallet, netuid=7, network=f"local:{alone}") as comms:
        assert len([line for line in caplog.messages if re.search(r"\d+ checkpoint parts, \d+ peers$", line)]) == 1
        assert (comms.uid, comms.hotkey, comms.alone) == (0, HOTKEYS["alice"].ss58_address, True)
        for local in (True, False):
            await comms.put(STATE, None, W, "gradient", 7, local=local)
            assert (await comms.get(0, W, "gradient", local=local)).global_step == 7
    assert [path.name for path in Path.cwd().iterdir()] == [".env"]
    assert len(list((alone.parent / "cache/states/7/0").iterdir())) == 1


async def test_local_states_are_in_the_cache_folder_by_default(alone: Path, hparams: HParams) -> None:
    bucket = new_account().writable
    async with LocalChain(alone, HOTKEYS["alice"]) as chain, S3Connections() as connections:
        comms = Comms(chain, hparams, connections, own_bucket=bucket)
        await comms.put(STATE, 3, W, "debug", 7)
    assert [path.name for path in Path.cwd().iterdir()] == [".env"]
    assert len(list((alone.parent / "cache/states/7/3").iterdir())) == 1


async def test_all_that_is_wrong_with_the_environment_is_said_at_once(
    alone: Path, hparams: HParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("R2_GRADIENTS_READ_ACCESS_KEY_ID")
    monkeypatch.setenv("R2_AGGREGATOR_BUCKET_NAME", "x")
    monkeypatch.setenv("R2_CHECKPOINTS_ACCOUNT_ID", "a/b")
    wallet = Wallet("owner", "alice", str(alone.parent / "wallets"))
    with pytest.raises(ConfigError) as caught:
        async with Comms.from_env(hparams, wallet=wallet, netuid=7, network=f"local:{alone}"):
            raise AssertionError
    for name in ("R2_GRADIENTS_READ_ACCESS_KEY_ID", "R2_AGGREGATOR_BUCKET_NAME", "R2_CHECKPOINTS_ACCOUNT_ID"):
        assert name in str(caught.value)


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


def most_at_once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, counts: Callable[..., bool]) -> list[int]:
    """The number of calls of ``method`` that run, at the beginning of each call that ``counts``."""
    running: list[int] = [0]
    real = getattr(owner, method)

    async def counted(self: object, *args: object, **options: object) -> object:
        now = running[0] = running[0] + counts(*args, **options)
        seen.append(now)
        try:
            return await real(self, *args, **options)
        finally:
            running[0] -= counts(*args, **options)

    seen: list[int] = []
    monkeypatch.setattr(owner, method, counted)
    return seen


@pytest.mark.parametrize("parts", [1, 3])
async def test_so_many_parts_of_a_checkpoint_travel_at_once(
    world: World, hparams: HParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setenv("TPLR_CHECKPOINT_PARTS", str(parts))
    leader, account = world[LEADER], world.accounts[LEADER]
    node = Comms(leader.chain, hparams, leader._connections, own_bucket=account.writable, folder=tmp_path / "node")
    await node.refresh()
    writer = ShardWriter(tmp_path / "snapshot", max_bytes=2**27)
    writer.write({"model.a": torch.ones(2**24)})  # 64 MiB and a header: five parts
    manifest = SnapshotManifest(
        window=7, start_window=0, global_step=7, version=hparams.version, values={},
        tensors=writer.tensors, shards=tuple(writer.shards),
    )  # fmt: skip
    write_manifest(tmp_path / "snapshot", manifest)
    sent = most_at_once(monkeypatch, S3Multipart, "put_part", lambda *_, **__: True)
    fetched = most_at_once(monkeypatch, S3Store, "receive", lambda *_, byte_range=None, **__: byte_range is not None)
    await node.publish_checkpoint(tmp_path / "snapshot")
    (checkpoint,) = await node.checkpoints()
    await node.fetch_checkpoint(checkpoint, tmp_path / "fetched", manifest.tensors)
    assert (max(sent), len(sent)) == (parts, 5)
    assert max(fetched) == parts
    # A state that goes in parts, too.
    monkeypatch.setattr(state_objects, "ONE_PUT_BYTES", 2**20)
    sent.clear()
    await node.put({"a": torch.ones(2**24)}, None, W, "checkpoint", local=False)
    assert (max(sent), len(sent)) == (parts, 5)


@pytest.mark.parametrize("peers", [1, 2])
async def test_so_many_peers_are_gathered_at_once(
    world: World, hparams: HParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: int
) -> None:
    monkeypatch.setenv("TPLR_GATHER_PEERS", str(peers))
    leader, account = world[LEADER], world.accounts[LEADER]
    node = Comms(leader.chain, hparams, leader._connections, own_bucket=account.writable, folder=tmp_path / "node")
    await node.refresh()
    for uid in (LEADER, ALICE, BOB):
        await world[uid].put({"w": torch.ones(3)}, uid, W, "gradient", local=False)
    heads = most_at_once(monkeypatch, S3Store, "head", lambda *_, **__: True)
    found = await node.gather(None, [LEADER, ALICE, BOB], W, "gradient", WAIT, device="cpu", totalks=None, local=False)
    assert found.uids == (LEADER, ALICE, BOB)
    assert max(heads) == peers


async def test_a_program_s_checkpoint(world: World, hparams: HParams, tmp_path: Path) -> None:
    """Published by the leader's program, loaded by a miner's; a miner's own is in its folder."""
    leader, miner = world[LEADER], world[ALICE]
    model, other = build_model(hparams), build_model(hparams.model_copy(update={"init_seed": 7}))
    optimizer, fresh = (torch.optim.AdamW(one.parameters(), lr=0.5) for one in (model, other))
    scheduler, later = (torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step) for one in (optimizer, fresh))
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    scheduler.step()
    momentum = {"model.norm.weight": torch.randn(hparams.model.hidden_size)}
    assert await miner.load_checkpoint(other) is None
    where = {"global_step": 3, "current_window": W, "start_window": 4}
    await leader.save_checkpoint(model, optimizer, scheduler, momentum, **where)
    found = await miner.load_checkpoint(other, fresh, later)
    assert found is not None
    assert (found.uid, found.window, found.start_window, found.global_step) == (LEADER, W, 4, 3)
    assert torch.equal(found.momentum["model.norm.weight"], momentum["model.norm.weight"])
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in model.state_dict().items())
    assert fresh.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys() != set()
    assert later.get_last_lr() == [0.25]
    await miner.save_checkpoint(other, fresh, local=True, **where | {"current_window": W + 1})
    assert [(one.uid, one.window) for one in await miner.checkpoints()] == [(LEADER, W), (ALICE, W + 1)]
    assert await world.keys(ALICE) == []
    left = [path.name for node in ("leader", "alice") for path in (tmp_path / node).iterdir()]
    assert left == [str(ALICE)]  # the folder of local states, no temporary one


async def test_no_permit_holder_stops_or_misleads_the_start_of_a_run(
    world: World, hparams: HParams, tmp_path: Path
) -> None:
    """One names a start window that never comes, the bucket of another refuses everybody."""
    admin = Ledger(world.chain, clock=world.clock)
    for name in ("alice", "bob"):
        admin.set_permit(HOTKEYS[name].ss58_address, True)
    admin.close()
    world.clock.advance(30 + 2 * hparams.blocks_per_window * world[LEADER].chain.block_time)  # elected then, too
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
    with pytest.raises(PayloadError, match="lies more than 100 windows ahead"):
        await published_start(context, hparams.start_horizon_windows)
    assert await published_start(context, hparams.start_horizon_windows + 1) is not None
    following.cancel()
