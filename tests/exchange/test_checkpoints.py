"""Published checkpoints are complete; a stranger's checkpoint is the requested one or is refused unread."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from signers import signed, signer

from tplr.chain.electors import Elector, Electors
from tplr.errors import AccessDenied, ObjectNotFound, StateError, StoreError, StoreUnavailable
from tplr.exchange import checkpoints
from tplr.exchange.checkpoints import Checkpoint, alike, discard_fetch, fetch, part_of, publish, published, withdraw
from tplr.exchange.envelope import Signer, canonical
from tplr.exchange.snapshot import MANIFEST, ShardWriter, SnapshotManifest, SnapshotReader, TensorLayout, write_manifest
from tplr.keys import RunVersion, checkpoint_prefix
from tplr.schemas import Bucket, ObjectInfo
from tplr.storage import MemoryStore, ObjectStore, S3Connections, download, parts
from tplr.storage.parts import count_parts
from tplr.testing.s3server import Rules, serve

KEY_ID, SECRET = "0123456789abcdef" * 2, "fedcba9876543210" * 4
PART = 2**16  # bytes
ME = signer()
MODEL = {"model.table": torch.arange(60.0).view(20, 3), "model.norm": torch.ones(7)}
RUN = {"version": "1"}
INNER = {"inner.table": torch.arange(60.0).view(20, 3) / 2}
WANTED = {name: TensorLayout.of(tensor) for name, tensor in MODEL.items()}


def snapshot(folder: Path, window: int, *, max_bytes: int = 100, version: str = "1") -> SnapshotManifest:
    writer = ShardWriter(folder, max_bytes=max_bytes)
    writer.write(MODEL)
    writer.write(INNER)
    manifest = SnapshotManifest(
        window=window,
        start_window=3,
        global_step=window - 3,
        version=version,
        values={"run": RUN, "outer": {"version": 1}},
        tensors=writer.tensors,
        shards=tuple(writer.shards),
    )
    write_manifest(folder, manifest)
    return manifest


@pytest.fixture(params=["memory", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    bucket = Bucket(name="b" * 32, account_id="a" * 32, access_key_id=KEY_ID, secret_access_key=SECRET)
    keys = {KEY_ID: {"secret": SECRET, "buckets": {bucket.name: "read-write"}}}
    rules = Rules(one_write_per_second=False, min_part_bytes=PART)
    async with serve(tmp_path / "s3", keys, port=0, rules=rules) as server, S3Connections(server.endpoint) as opened:
        yield opened.store(bucket)


async def take(
    store: ObjectStore, folder: Path, *, window: int = 9, wanted: dict[str, TensorLayout] = WANTED
) -> SnapshotManifest:
    return await fetch(Checkpoint(store, window, ME), folder, wanted=wanted)


async def test_round_trip(store: ObjectStore, tmp_path: Path) -> None:
    for window in (7, 8, 9):
        snapshot(tmp_path / str(window), window)
        await publish(store, tmp_path / str(window), signer=ME, keep_last=2)
    assert [(one.window, one.uid) for one in await published(store, ME)] == [(9, 5), (8, 5)]
    assert await published(store, signer(version="2")) == []
    manifest = await take(store, tmp_path / "got")
    assert (manifest.window, manifest.global_step, manifest.values) == (9, 6, {"run": RUN, "outer": {"version": 1}})
    # Parts that were not requested were not fetched.
    assert manifest.tensors.keys() == MODEL.keys()
    assert not any("inner" in piece.tensor for shard in manifest.shards for piece in shard.pieces)
    assert len(list((tmp_path / "got").iterdir())) == len(manifest.shards) + 1
    reader = SnapshotReader(tmp_path / "got", manifest)
    for name, tensor in MODEL.items():
        target = torch.zeros_like(tensor)
        reader.read_into(name, target)
        assert torch.equal(target, tensor)


class Stalling(MemoryStore):
    """Sends no byte of a shard."""

    asked = 0

    async def receive(self, key: str, *_: Any, **__: Any) -> ObjectInfo:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


async def test_shards_come_from_any_author_of_the_same_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PATIENCE_SECONDS", 0.3)
    stalling, good = Stalling(), MemoryStore()
    mine = snapshot(tmp_path / "mine", 10)
    for store, author in ((stalling, ME), (good, signer(6)), (good, signer(7))):
        await publish(store, tmp_path / "mine", signer=author, keep_last=3)
    snapshot(tmp_path / "other", 10, max_bytes=50)
    await publish(good, tmp_path / "other", signer=signer(8), keep_last=3)
    first, *others = (Checkpoint(stalling, 10, ME), *(Checkpoint(good, 10, signer(uid)) for uid in (6, 7, 8, 9)))
    stakes = {8: 40, 5: 21, 6: 20, 7: 19}
    electors = Electors(tuple(Elector(uid, signer(uid).hotkey, stake) for uid, stake in stakes.items()))
    ranked = sorted([first, *others], key=lambda one: -electors.stake([one.uid]))
    groups = await alike(ranked, partial(part_of, wanted=WANTED), electors)
    assert [[one.uid for one in group.checkpoints] for group in groups] == [[5, 6, 7], [8], [9]]
    assert all((group.manifest is None) == (group is groups[2]) for group in groups)
    (first, *mirrors), manifest = groups[0]
    fetched = await fetch(first, tmp_path / "fetched", wanted=WANTED, manifest=manifest, mirrors=mirrors)
    assert fetched.shards == mine.shards[: len(fetched.shards)]
    assert len(fetched.shards) == 3
    assert stalling.asked == 1  # for the first shard only
    with pytest.raises(StoreUnavailable):
        await fetch(first, tmp_path / "alone", wanted=WANTED)


class Refusing(MemoryStore):
    """Sends one shard at once, so that others are slow in comparison, and refuses the next."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = asyncio.Event()
        self.sent = ""

    async def receive(self, key: str, *args: Any, **more: Any) -> ObjectInfo:
        self.sent = self.sent or key
        if key != self.sent:
            self.refused.set()
            raise AccessDenied("refused", bucket=self.name, key=key)
        return await super().receive(key, *args, **more)


class TooSlow(MemoryStore):
    """Sends two parts, and the next ones only after ``recovers`` is set."""

    def __init__(self, recovers: asyncio.Event) -> None:
        super().__init__()
        self.recovers = recovers
        self.sent: list[int] = []
        self.stalled = 0

    async def receive(self, key: str, *args: Any, byte_range: tuple[int, int], **more: Any) -> ObjectInfo:
        if len(self.sent) == 2:
            self.stalled += 1
            await self.recovers.wait()
        info = await super().receive(key, *args, byte_range=byte_range, **more)
        self.sent.append(byte_range[0])
        return info


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SnapshotManifest:
    """A snapshot of two shards of five parts each, in the folder ``mine``; deadlines are short."""
    for module, name, value in (
        (parts, "MIB", PART),
        (parts, "MIN_PART_BYTES", PART),
        (checkpoints, "SLOW_SECONDS", 0.3),
        (checkpoints, "FLOOR", 1),
        (download, "PATIENCE_SECONDS", 0.6),
    ):
        monkeypatch.setattr(module, name, value)
    writer = ShardWriter(tmp_path / "mine", max_bytes=4 * PART)
    for name in ("model.first", "model.second"):
        writer.write({name: torch.arange(PART, dtype=torch.float32).view(1, -1)})
    assert [len(shard.blake3s) for shard in writer.shards] == [5, 5]
    manifest = SnapshotManifest(
        window=9, start_window=3, global_step=6, version="1", values={}, tensors=writer.tensors,
        shards=tuple(writer.shards),
    )  # fmt: skip
    write_manifest(tmp_path / "mine", manifest)
    return manifest


@pytest.mark.parametrize("recovers", [True, False])
async def test_who_was_given_up_as_too_slow_is_asked_again_if_all_others_fail(
    tmp_path: Path, large: SnapshotManifest, recovers: bool
) -> None:
    fast = Refusing()
    slow = TooSlow(fast.refused if recovers else asyncio.Event())
    sources = [Checkpoint(fast, 9, ME), Checkpoint(slow, 9, signer(6))]
    for source in sources:
        await publish(source.store, tmp_path / "mine", signer=signer(source.uid), keep_last=3)
    fetched = fetch(
        sources[0], tmp_path / "got", wanted=large.tensors, manifest=large, mirrors=sources[1:], concurrency=1
    )
    if recovers:
        assert (await fetched).shards == large.shards
        assert slow.sent == [at * PART for at in range(5)]  # no part was fetched twice
    else:
        with pytest.raises(StoreUnavailable):
            await fetched
    assert fast.refused.is_set()
    assert slow.stalled == 2


async def test_without_its_manifest_it_is_not_there(tmp_path: Path) -> None:
    class DiesBeforeTheManifest(MemoryStore):
        async def put(self, key, data, **options):
            if key.endswith(MANIFEST):
                raise StoreError("killed")
            return await super().put(key, data, **options)

    store = DiesBeforeTheManifest()
    manifest = snapshot(tmp_path / "mine", 9)
    with pytest.raises(StoreError, match="killed"):
        await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    assert len(await store.list("checkpoint-")) == len(manifest.shards)
    assert await published(store, ME) == []
    with pytest.raises(ObjectNotFound):
        await take(store, tmp_path / "got")
    with pytest.raises(FileNotFoundError):
        await publish(store, tmp_path / "nothing", signer=ME, keep_last=2)


async def test_old_ones_that_stay_do_not_make_the_new_one_unpublished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class KeepsEverything(MemoryStore):
        async def delete(self, key: str) -> None:
            raise StoreError("not permitted")

    store = KeepsEverything()
    for window in (8, 9):
        await publish(store, tmp_path / str(snapshot(tmp_path / str(window), window).window), signer=ME, keep_last=1)
    assert [one.window for one in await published(store, ME)] == [9, 8]
    assert "old checkpoints not deleted: not permitted" in caplog.text


async def test_what_arrived_is_not_sent_or_fetched_again(tmp_path: Path) -> None:
    class Counts(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.puts: list[str] = []
            self.received: list[str] = []
            self.broken = False

        async def put_file(self, key, path, **options):
            if self.broken and len(self.puts) == 2:
                raise StoreError("gone")
            self.puts.append(key)
            return await super().put_file(key, path, **options)

        async def receive(self, key, sink, **options):
            if self.broken and len(self.received) == 2:
                raise StoreError("gone")
            self.received.append(key)
            return await super().receive(key, sink, **options)

    store = Counts()
    manifest = snapshot(tmp_path / "mine", 9)
    store.broken = True
    with pytest.raises(StoreError, match="gone"):
        await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    store.broken = False
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    assert sorted(store.puts) == sorted(f"{checkpoint_prefix(9, 5, '1')}{shard.name}" for shard in manifest.shards)

    store.broken = True
    with pytest.raises(StoreError, match="gone"):
        await take(store, tmp_path / "got")
    store.broken = False
    await take(store, tmp_path / "got")
    assert 2 < len(store.received) == len(set(store.received))
    discard_fetch(tmp_path / "got")
    assert [path.name for path in (tmp_path / "got").iterdir()] == [MANIFEST]


async def test_what_an_earlier_life_stored_of_other_bytes_is_replaced(store: ObjectStore, tmp_path: Path) -> None:
    manifest = snapshot(tmp_path / "mine", 9)
    key = checkpoint_prefix(9, 5, "1") + manifest.shards[0].name
    body = bytearray(await asyncio.to_thread((tmp_path / "mine" / manifest.shards[0].name).read_bytes))
    body[-1] ^= 1
    await store.put(key, bytes(body))
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    await take(store, tmp_path / "got")


async def test_checkpoints_of_a_wrong_way_are_withdrawn(tmp_path: Path) -> None:
    store = MemoryStore()
    for window, uid in ((7, 5), (8, 5), (9, 5), (9, 6)):
        snapshot(tmp_path / f"{window}-{uid}", window)
        await publish(store, tmp_path / f"{window}-{uid}", signer=signer(uid), keep_last=3)
    await withdraw(store, uid=5, after=7, version="1")
    assert {uid: [one.window for one in await published(store, signer(uid))] for uid in (5, 6)} == {5: [7], 6: [9]}
    assert await store.list(checkpoint_prefix(8, 5, "1")) == []


def bigger(manifest: dict) -> None:
    digests = ["0" * 64] * count_parts(2**40)
    manifest["shards"][0] |= {"size": 2**40, "blake3s": digests, "sha256s": digests}


def more_parts_than_its_size(manifest: dict) -> None:
    manifest["shards"][0]["blake3s"] *= 2


def no_digests(manifest: dict) -> None:
    manifest["shards"][0]["blake3s"] = []


def no_hash(manifest: dict) -> None:
    manifest["shards"][0]["blake3s"] = ["0" * 63]


def another_shape(manifest: dict) -> None:
    manifest["tensors"]["model.table"]["shape"] = [20, 4]


def smuggled(manifest: dict) -> None:
    name = "junk\n\x1b[31m"
    manifest["tensors"][name] = {"dtype": "F32", "shape": [2**40]}
    manifest["shards"][0]["pieces"].append({"tensor": name, "start": 0, "rows": 2**40})


def a_gap(manifest: dict) -> None:
    manifest["shards"][0]["pieces"].pop()


def another_window(manifest: dict) -> None:
    manifest["window"] = 10


def another_hash(manifest: dict) -> None:
    manifest["shards"][0]["blake3s"] = ["0" * 64]


def twice_the_name(manifest: dict) -> None:
    manifest["shards"][1]["name"] = manifest["shards"][0]["name"]


def no_json(manifest: dict) -> None:
    manifest.clear()


LIES = [bigger, more_parts_than_its_size, no_digests, no_hash, another_shape, smuggled, a_gap, another_window]
LIES += [another_hash, twice_the_name, no_json]


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_refused_and_nothing_large_is_fetched(tmp_path: Path, lie) -> None:
    store = MemoryStore()
    snapshot(tmp_path / "mine", 9)
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    key = checkpoint_prefix(9, 5, "1") + MANIFEST
    manifest = json.loads((await store.get(key, max_bytes=2**20)).split(b"\n")[1])
    lie(manifest)
    await store.put(key, signed(canonical(manifest), SnapshotManifest, window=9, by=ME))
    with pytest.raises((StateError, StoreError)) as refused:
        await take(store, tmp_path / "got")
    assert not isinstance(refused.value, StoreUnavailable)
    assert str(refused.value).isprintable()  # it is logged
    assert not (tmp_path / "got" / MANIFEST).exists()


@pytest.mark.parametrize("author", [signer(5, name="eve"), signer(6), signer(netuid=4)])
async def test_a_manifest_by_another_hotkey_is_refused(tmp_path: Path, author: Signer) -> None:
    store = MemoryStore()
    manifest = snapshot(tmp_path / "mine", 9)
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    key = checkpoint_prefix(9, 5, "1") + MANIFEST
    await store.put(key, signed(manifest, SnapshotManifest, window=9, by=author))
    with pytest.raises(StateError, match=r"not a document of .* signed by"):
        await take(store, tmp_path / "got")


async def test_the_same_checkpoint_is_published_once(tmp_path: Path) -> None:
    """For any number of starts: the signature differs, the manifest does not."""
    store = MemoryStore()
    snapshot(tmp_path / "mine", 9)
    key = checkpoint_prefix(9, 5, "1") + MANIFEST
    etags = set()
    for _ in range(2):
        await publish(store, tmp_path / "mine", signer=ME, keep_last=2, replace=True)
        etags.add((await store.head(key)).etag)
    assert len(etags) == 1
    await store.put(key, b"of an older version of this package")
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2, replace=True)
    await take(store, tmp_path / "got")


async def test_checkpoints_are_published_across_a_change_of_the_runs_rules(tmp_path: Path) -> None:
    store, author = MemoryStore(), signer(version=RunVersion("1", [(8, "2")]))
    for window, version in ((7, "1"), (8, "2")):
        snapshot(tmp_path / version, window, version=version)
        await publish(store, tmp_path / version, signer=author, keep_last=2)
        found = await fetch(Checkpoint(store, window, author), tmp_path / f"got {version}", wanted=WANTED)
        assert found.version == version
    assert [one.window for one in await published(store, author)] == [8, 7]


async def test_a_snapshot_of_another_version_is_not_published(tmp_path: Path) -> None:
    snapshot(tmp_path / "mine", 9, version="2")
    with pytest.raises(StateError, match="of version 2, the run has version 1"):
        await publish(MemoryStore(), tmp_path / "mine", signer=ME, keep_last=2)


async def test_numbers_that_were_changed_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    manifest = snapshot(tmp_path / "mine", 9)
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    path = tmp_path / "mine" / manifest.shards[0].name
    body = bytearray(await asyncio.to_thread(path.read_bytes))
    body[-1] ^= 1
    await store.put(checkpoint_prefix(9, 5, "1") + manifest.shards[0].name, bytes(body))
    with pytest.raises(StoreError, match="not the object's bytes"):
        await take(store, tmp_path / "got")
    assert not (tmp_path / "got" / MANIFEST).exists()


async def test_a_shard_under_another_header_is_refused(tmp_path: Path) -> None:
    """With matching digests, because no digest covers the header."""
    store = MemoryStore()
    manifest = snapshot(tmp_path / "mine", 9)
    name = manifest.shards[0].name
    body = bytearray(await asyncio.to_thread((tmp_path / "mine" / name).read_bytes))
    body[9] ^= 1
    await asyncio.to_thread((tmp_path / "mine" / name).write_bytes, body)
    digests = {"blake3s": (blake3(body).hexdigest(),), "sha256s": (hashlib.sha256(body).hexdigest(),)}
    changed = manifest.shards[0].model_copy(update=digests)
    write_manifest(tmp_path / "mine", manifest.model_copy(update={"shards": (changed, *manifest.shards[1:])}))
    await publish(store, tmp_path / "mine", signer=ME, keep_last=2)
    with pytest.raises(StateError, match="its header"):
        await take(store, tmp_path / "got")
    assert not (tmp_path / "got" / MANIFEST).exists()


async def test_a_large_shard_travels_by_the_digests_of_its_parts(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that was damaged on this disk before the upload is named, and nothing becomes visible."""
    monkeypatch.setattr(parts, "MIB", PART)
    monkeypatch.setattr(parts, "MIN_PART_BYTES", PART)
    folder = tmp_path / "mine"
    writer = ShardWriter(folder)
    table = torch.arange(PART, dtype=torch.float32).view(-1, 4)
    writer.write({"model.table": table})
    assert [(len(shard.blake3s), len(shard.sha256s)) for shard in writer.shards] == [(5, 5)]
    manifest = SnapshotManifest(
        window=9, start_window=3, global_step=6, version="1", values={}, tensors=writer.tensors,
        shards=tuple(writer.shards),
    )  # fmt: skip
    write_manifest(folder, manifest)
    path = folder / writer.shards[0].name
    right = await asyncio.to_thread(path.read_bytes)
    if store.multipart is not None:
        await asyncio.to_thread(path.write_bytes, right[:-1] + bytes([right[-1] ^ 1]))
        with pytest.raises(StoreError, match="part 5 does not match its digest"):
            await publish(store, folder, signer=ME, keep_last=2)
        assert await store.list("checkpoint-") == await store.multipart.unfinished() == []
        await asyncio.to_thread(path.write_bytes, right)
    await publish(store, folder, signer=ME, keep_last=2)
    got = await take(store, tmp_path / "got", wanted=writer.tensors)
    target = torch.zeros_like(table)
    SnapshotReader(tmp_path / "got", got).read_into("model.table", target)
    assert torch.equal(target, table)
