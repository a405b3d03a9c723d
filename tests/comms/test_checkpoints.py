"""Checkpoints of nodes and programs: where they are published, and the order in which they are found."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from signers import signer
from three_nodes import ALICE, LEADER, W, World, most_at_once

from tplr.comms import Comms
from tplr.comms.checkpoints import CheckpointExchange
from tplr.errors import AccessDenied
from tplr.exchange import state_objects
from tplr.exchange.snapshot import ShardWriter, SnapshotManifest, TensorLayout, write_manifest
from tplr.hparams import HParams
from tplr.storage import MemoryStore, ObjectStore, S3Store
from tplr.storage.s3_multipart import S3Multipart
from tplr.testing.s3server import Status
from tplr.training.model import build_model


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
    # The leading validator's checkpoints first, then those in the node's own bucket, then those on this machine.
    assert found == [(7, leader.uid), (9, miner.uid), (10, miner.uid)]
    assert [(one.window, one.uid) for one in await leader.checkpoints()] == [(7, leader.uid)]

    # An unreachable bucket hides no other place, but without it the first checkpoint is unknown.
    fault = world.server.faults.add(rf"^GET /{world.accounts[0].name}\?", Status(403, "AccessDenied"), times=None)
    assert [(one.window, one.uid) for one in await miner.checkpoints()] == [(9, miner.uid), (10, miner.uid)]
    with pytest.raises(AccessDenied):
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
