"""State dicts that programs put, get and gather."""

import pickle
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from three_nodes import ALICE, BOB, EVIL, LEADER, STATE, WAIT, W, World, most_at_once

from tplr.comms import Comms
from tplr.errors import AccessDenied, ObjectNotFound, ObjectTooLarge
from tplr.exchange import state_objects
from tplr.hparams import HParams
from tplr.keys import state_key
from tplr.localnet.accounts import key_table
from tplr.schemas import PeerList, Reason
from tplr.storage import S3Store
from tplr.testing.s3server import FlipBit, Status
from tplr.training.model import build_model


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
    with pytest.raises(ObjectNotFound, match="uid 3 has no bucket on chain"):
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
    """Return the coefficients of a parameter ``w``, in one row."""
    return {"widxs": torch.tensor([indices or [*range(len(values))]]), "wvals": torch.tensor([values])}


@pytest.mark.parametrize("totalks", [{"w": 8}, None])
async def test_gather_gives_every_peer_unit_norm(world: World, totalks: dict[str, int] | None) -> None:
    """For values of any size: a peer can't increase its own weight."""
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
    """``min(topk_compression, totalk)``: here 2, or fewer if the tensor has fewer entries."""
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
    monkeypatch.setattr("tplr.storage.s3_store.MAX_PUT_BYTES", 2**25)  # limit of one PUT to a bucket
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
    # Damage in transit is found, although the store can't check a multipart ETag.
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
