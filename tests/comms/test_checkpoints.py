"""Checkpoints of nodes and programs: where they are published, and the order in which they are found."""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from signers import signer
from three_nodes import ALICE, BOB, HOTKEYS, LEADER, NAMES, W, World, most_at_once
from torch import nn

from tplr.chain.ledger import Ledger
from tplr.comms import Comms
from tplr.comms.checkpoints import CheckpointExchange
from tplr.errors import StateError, StoreUnavailable
from tplr.exchange import state_objects
from tplr.exchange.snapshot import ShardWriter, SnapshotManifest, TensorLayout, write_manifest
from tplr.hparams import HParams
from tplr.storage import MemoryStore, ObjectStore, S3Store
from tplr.storage.s3_multipart import S3Multipart
from tplr.testing.s3server import Status
from tplr.training.model import build_model

Snapshot = Callable[..., Path]


@pytest.fixture
def snapshot(hparams: HParams, tmp_path: Path) -> Snapshot:
    """Writes a snapshot of a model with one tensor of this value; ``values``: those of the manifest."""

    def written(window: int, *, value: float = 1.0, **values: Any) -> Path:
        folder = tmp_path / f"{window} {value} {values}"
        writer = ShardWriter(folder)
        writer.write({"model.a": torch.full((3,), value)})
        manifest = SnapshotManifest(
            window=window,
            start_window=0,
            global_step=window,
            version=hparams.version,
            values=values,
            tensors=writer.tensors,
            shards=tuple(writer.shards),
        )
        write_manifest(folder, manifest)
        return folder

    return written


async def test_checkpoints_may_have_a_bucket_of_their_own(world: World, snapshot: Snapshot, tmp_path: Path) -> None:
    leader, miner = world[0], world[1]
    assert await miner.get_latest_checkpoint() is None
    await leader.publish_checkpoint(snapshot(7))
    await miner.publish_checkpoint(snapshot(9))
    await miner.publish_checkpoint(snapshot(10), local=True)
    found = [(one.window, one.uid) for one in await miner.checkpoints()]
    # The leading validator's checkpoints first, then those in the node's own bucket, then those on this machine.
    assert found == [(7, leader.uid), (9, miner.uid), (10, miner.uid)]
    assert [(one.window, one.uid) for one in await leader.checkpoints()] == [(7, leader.uid)]

    # An unreachable bucket hides no other place, but without it the latest checkpoint is unknown.
    fault = world.server.faults.add(rf"^GET /{world.accounts[0].name}\?", Status(403, "AccessDenied"), times=None)
    assert [(one.window, one.uid) for one in await miner.checkpoints()] == [(9, miner.uid), (10, miner.uid)]
    with pytest.raises(StoreUnavailable, match=f"uid {leader.uid}: .*access denied"):
        await miner.get_latest_checkpoint()
    fault.left = 0

    assert [store.name for store in leader.own_stores] == [world.accounts[0].name]
    leader._checkpoints = miner._checkpoints = leader._connections.store(world.common.writable)
    # Both are cleaned when the node starts: unfinished uploads of a killed node are among its checkpoints.
    assert [store.name for store in leader.own_stores] == [world.accounts[0].name, "common"]
    await leader.publish_checkpoint(snapshot(8))
    latest = await miner.get_latest_checkpoint()
    assert latest is not None
    assert (latest.window, latest.uid, latest.store.name) == (8, leader.uid, "common")
    assert not [key for key in await world.keys(leader.uid) if key.startswith("checkpoint-8-")]
    fetched = await miner.fetch_checkpoint(latest, tmp_path / "got", {"model.a": TensorLayout.of(torch.ones(3))})
    assert fetched.window == 8

    # Newest first, also among checkpoints in two places.
    leader._checkpoints = None
    await leader.publish_checkpoint(snapshot(11))
    assert await miner.leaders_checkpoints() == []  # none of these windows has begun
    world.clock.advance(12 * miner.blocks_per_window * miner.chain.block_time)
    assert [one.window for one in await miner.leaders_checkpoints()] == [11, 8, 7]
    assert [one.window for one in await miner.checkpoints()][:3] == [11, 8, 7]


class Newcomer(CheckpointExchange):
    """Lists the checkpoints of three electors."""

    uid: Any = 9
    electors: Any = SimpleNamespace(uids=(0, 1, 2))

    def __init__(self, windows: Mapping[int, Iterable[int]]) -> None:
        self._windows, self._checkpoints = windows, MemoryStore("own")
        self.local_store: Any = lambda uid: MemoryStore("local")
        self.author: Any = lambda uid, version=None: signer(uid)

    def _public_stores(self, uid: int) -> list[ObjectStore]:
        return [self.holding(uid)] if uid in self._windows else []

    def holding(self, uid: int) -> MemoryStore:
        store = MemoryStore(str(uid))
        for window in self._windows[uid]:
            key = f"checkpoint-{window}-{uid}-v1/manifest.json"
            store._put(key, io.BytesIO(b"{}"), {}, create_only=False)
        return store


async def test_many_checkpoints_of_one_elector_come_between_those_of_others() -> None:
    """Each may have garbage weights, which is only detected after its download."""
    newcomer = Newcomer({0: [10, 20], 1: range(21, 60), 2: [20]})
    found = [(one.uid, one.window) for one in await newcomer.checkpoints()]
    assert found[:6] == [(1, 59), (0, 20), (2, 20), (1, 58), (0, 10), (1, 57)]
    assert len(found) == 42


class Tensor(nn.Module):
    """A model of one tensor, as in the snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))


@pytest.fixture
async def council(world: World) -> World:
    """All three nodes are electors, and none has half of the stake."""
    with contextlib.closing(Ledger(world.chain, clock=world.clock)) as admin:
        for name, stake in zip(NAMES, (40.0, 35.0, 25.0), strict=True):
            admin.set_stake(HOTKEYS[name].ss58_address, stake)
            admin.set_permit(HOTKEYS[name].ss58_address)
    world.clock.advance(30)
    for comms in world.nodes:
        await comms.refresh()
    assert world[BOB].electors.uids == (LEADER, ALICE, BOB)
    return world


async def latest(comms: Comms) -> tuple[int, int] | None:
    """Return window and author of the latest checkpoint."""
    found = await comms.get_latest_checkpoint()
    return found and (found.window, found.uid)


async def test_electors_with_most_of_the_stake_choose_the_latest_checkpoint(
    council: World, snapshot: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leader, alice, bob = council.nodes
    await leader.publish_checkpoint(snapshot(9, value=666.0))
    # Nobody else knows it: a node has its own one, or none.
    assert await latest(alice) is None
    assert f"(uid {LEADER}: windows [9]; uid {ALICE}: none; uid {BOB}: none)" in caplog.text
    await alice.publish_checkpoint(snapshot(7), local=True)
    assert await latest(alice) == (7, ALICE)
    # Two publish one alike. Values that nobody uses may differ.
    await alice.publish_checkpoint(snapshot(8))
    await bob.publish_checkpoint(snapshot(8, peers=[3]))
    assert await latest(leader) == await latest(alice) == (8, ALICE)
    # A newer one counts when it has most of the stake, too.
    await bob.publish_checkpoint(snapshot(9))
    assert await latest(alice) == (8, ALICE)
    await alice.publish_checkpoint(snapshot(9))
    assert await latest(leader) == await latest(alice) == (9, ALICE)
    # An elector whose bucket is closed has no vote.
    fault = council.server.faults.add(rf"^GET /{council.accounts[0].name}\?", Status(403, "AccessDenied"), times=None)
    assert await latest(bob) == (9, ALICE)
    fault.left = 0


async def test_the_latest_checkpoint_is_unknown_while_electors_with_most_of_the_stake_may_have_one(
    council: World, snapshot: Snapshot
) -> None:
    leader, alice, bob = council.nodes
    await leader.publish_checkpoint(snapshot(8))
    await alice.publish_checkpoint(snapshot(8, value=2.0))
    with pytest.raises(StateError, match=r"no checkpoint is published alike .*uid 0: windows \[8\]; uid 1: windows"):
        await bob.get_latest_checkpoint()
    await bob.publish_checkpoint(snapshot(8))
    assert await latest(bob) == (8, LEADER)
    fault = council.server.faults.add(rf"^GET /{council.accounts[0].name}\?", Status(403, "AccessDenied"), times=None)
    with pytest.raises(StoreUnavailable, match=r"uid 0: .*access denied.*; uid 1: windows \[8\]; uid 2: windows \[8\]"):
        await alice.get_latest_checkpoint()
    fault.left = 0


async def test_only_checkpoints_from_before_a_time_are_agreed_on(council: World, snapshot: Snapshot) -> None:
    leader, alice, bob = council.nodes
    for comms in (leader, alice):
        await comms.publish_checkpoint(snapshot(7))
        await comms.publish_checkpoint(snapshot(8))
    council.clock.advance(10)
    before = council.clock.now()
    council.clock.advance(10)
    await leader.publish_checkpoint(snapshot(9))
    await alice.publish_checkpoint(snapshot(9))
    found = [(await bob.agreed_checkpoint(lambda whole: whole, before=one)).checkpoints for one in (before, math.inf)]
    assert [[(one.window, one.uid) for one in each] for each in found] == [
        [(8, LEADER), (8, ALICE)],
        [(9, LEADER), (9, ALICE)],
    ]


async def test_a_program_loads_what_most_electors_publish(council: World, snapshot: Snapshot) -> None:
    leader, alice, bob = council.nodes
    await bob.publish_checkpoint(snapshot(7, value=7.0))
    await alice.publish_checkpoint(snapshot(7, value=7.0))
    await leader.publish_checkpoint(snapshot(9, value=666.0))
    model = Tensor()
    found = await bob.load_checkpoint(model)
    assert found is not None
    assert (found.uid, found.window, model.a.tolist()) == (ALICE, 7, [7.0] * 3)
    # A program that trusts one elector names its checkpoint.
    checkpoint = next(one for one in await bob.checkpoints() if one.uid == LEADER)
    found = await bob.load_checkpoint(model, checkpoint=checkpoint)
    assert found is not None
    assert (found.uid, found.window, model.a.tolist()) == (LEADER, 9, [666.0] * 3)


async def test_electors_with_different_optimizers_have_no_common_checkpoint_with_one(council: World) -> None:
    """An elector with less than half of the stake could add its own optimizer to the model of most electors."""
    where = {"global_step": 3, "current_window": W, "start_window": 4}
    model = Tensor()
    for comms, rate in ((council[LEADER], 666.0), (council[ALICE], 0.5), (council[BOB], 0.5)):
        await comms.save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=rate), **where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = await council[BOB].load_checkpoint(model, optimizer)
    assert found is not None
    assert (found.uid, optimizer.param_groups[0]["lr"]) == (ALICE, 0.5)
    await council[BOB].save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), **where)
    with pytest.raises(StateError, match="no checkpoint is published alike"):
        await council[BOB].load_checkpoint(model, optimizer)
    assert (await council[BOB].load_checkpoint(model)) is not None


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
    # Also a state that is uploaded in parts.
    monkeypatch.setattr(state_objects, "ONE_PUT_BYTES", 2**20)
    sent.clear()
    await node.put({"a": torch.ones(2**24)}, None, W, "checkpoint", local=False)
    assert (max(sent), len(sent)) == (parts, 5)


async def test_a_program_s_checkpoint(world: World, hparams: HParams, tmp_path: Path) -> None:
    """The leader's program publishes it and a miner's program loads it; a miner's own checkpoint is in its folder."""
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
