"""Checkpoints: snapshots in buckets. The manifest is written last, so no reader sees an incomplete one."""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tplr.chain.electors import Electors
from tplr.errors import ObjectNotFound, PayloadError, StateError, StoreError, StoreUnavailable
from tplr.exchange.documents import READ_SECONDS, get_signed, holds_document, put_document
from tplr.exchange.envelope import Author, Signer
from tplr.exchange.retention import delete_old_checkpoints
from tplr.exchange.snapshot import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SnapshotManifest,
    SnapshotShard,
    TensorLayout,
    check_head,
    check_shards,
    read_manifest,
    shard_head,
    write_manifest,
)
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.keys import checkpoint_prefix, parse_window_key, version_at
from tplr.logging import logger
from tplr.storage import ObjectStore, discard_download, download_file, etag_of, upload_file
from tplr.storage.download import FLOOR
from tplr.storage.many import delete_many, for_each, list_objects
from tplr.storage.retry import with_retry
from tplr.storage.upload import CONCURRENCY as PARTS_AT_ONCE
from tplr.untrusted import printable

HEAD_SECONDS = 60.0
# Time of a shard in addition to that at the expected speed.
SLOW_SECONDS = 10.0
# A header names its shard's pieces, a few hundred bytes each.
MAX_HEAD_BYTES = 2**20
# Manifests that are read at once: a hostile one takes up to 55 times its size in memory.
MANIFESTS_AT_ONCE = 4

# Returns what a reader uses of a manifest, as a manifest. Raises StateError if it lacks something.
UsedPart = Callable[[SnapshotManifest], SnapshotManifest]


class Checkpoint(NamedTuple):
    """The location of a checkpoint."""

    store: ObjectStore
    window: int
    author: Author

    @property
    def uid(self) -> int:
        return self.author.uid

    @property
    def prefix(self) -> str:
        return checkpoint_prefix(self.window, self.author.uid, self.author.run.version)


class Copies(NamedTuple):
    """Checkpoints of one window of which the same is used; ``manifest``: of that part; None if it is not known."""

    checkpoints: list[Checkpoint]
    manifest: SnapshotManifest | None = None


async def publish(
    store: ObjectStore,
    folder: Path,
    *,
    signer: Signer,
    keep_last: int,
    replace: bool = False,
    without: Collection[str] = (),
    concurrency: int = PARTS_AT_ONCE,
) -> SnapshotManifest:
    """Upload a snapshot as a checkpoint of its window, signed; then delete all but the signer's ``keep_last`` newest.

    Shards that an earlier call stored are not sent again. ``folder`` must not change during the call.

    Args:
        replace: replace a different checkpoint of that window. Without it, the first one stays.
        without: names of values that are not published.
        concurrency: number of parts that are sent at once.

    Raises:
        FileNotFoundError: the folder holds no snapshot.
        StateError: its manifest is invalid or torn, or its version is not that of the signer's run.
        StoreError: as ``upload_file``; the checkpoint is not visible, and the next call resumes.
    """
    manifest = await asyncio.to_thread(read_manifest, folder)
    window, prefix = manifest.window, Checkpoint(store, manifest.window, signer).prefix
    if manifest.version != (version := version_at(signer.run.version, window)):
        raise StateError(f"{folder}: of version {manifest.version}, the run has version {version}")
    values = {name: value for name, value in manifest.values.items() if name not in without}
    manifest = manifest.model_copy(update={"values": values}).sealed()
    stored = {info.key for info in await list_objects(store, prefix)}
    name = prefix + MANIFEST
    if replace and name in stored and not await holds_document(store, name, manifest, window=window, author=signer):
        await delete_many(store, [name])
        stored.remove(name)
    if name not in stored:
        for shard in manifest.shards:
            if prefix + shard.name not in stored or not await _holds(store, prefix + shard.name, folder / shard.name):
                path = folder / shard.name
                await upload_file(store, prefix + shard.name, path, sha256s=shard.sha256s, concurrency=concurrency)
        await put_document(store, name, manifest, window=window, signer=signer)
    try:
        await delete_old_checkpoints(store, uid=signer.uid, keep_last=keep_last, version=signer.run.version)
    except StoreError as error:
        # The new checkpoint is published; the next call tries again to delete the old ones.
        logger.warning("old checkpoints not deleted: %s", error)
    return manifest


async def published(store: ObjectStore, author: Author, *, before: float = math.inf) -> list[Checkpoint]:
    """List the complete checkpoints of ``author`` in a bucket, newest first; not verified. Raises StoreError.

    Args:
        before: list only those that were complete before this time, by the store's clock.
    """
    found = []
    for info in await list_objects(store, "checkpoint-", deadline_seconds=READ_SECONDS):
        key = parse_window_key(info.key, author.run.version)
        if key and key.uid == author.uid:
            checkpoint = Checkpoint(store, key.window, author)
            if info.key == checkpoint.prefix + MANIFEST and info.last_modified < before:
                found.append(checkpoint)
    return sorted(found, key=lambda one: one.window, reverse=True)


def manifest_cap(wanted: Mapping[str, TensorLayout]) -> int:
    """Return an upper bound in bytes on the manifest of a snapshot with these tensors.

    It is about five times what nodes write: 200 bytes per tensor, 270 per piece with its shard, 134 per 16 MiB or more.
    """
    data = sum(layout.rows * layout.row_bytes for layout in wanted.values())
    return min(MAX_MANIFEST_BYTES, 2**17 + sum(2048 + 4 * len(name) for name in wanted) + data // 2**13)


async def fetch_manifest(checkpoint: Checkpoint, *, max_bytes: int = MAX_MANIFEST_BYTES) -> SnapshotManifest:
    """Read the manifest of a checkpoint. Raises StoreError, and StateError unless its author signed it."""
    store, window, author = checkpoint
    key = checkpoint.prefix + MANIFEST
    try:
        found = await get_signed(
            store, key, SnapshotManifest, window=window, author=author, max_bytes=max_bytes, retry=True
        )
    except PayloadError as error:
        raise StateError(f"{store.name}/{error}") from error
    return found.document


async def fetch(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    wanted: Mapping[str, TensorLayout],
    manifest: SnapshotManifest | None = None,
    mirrors: Sequence[Checkpoint] = (),
    concurrency: int = PARTS_AT_ONCE,
) -> SnapshotManifest:
    """Download the tensors ``wanted`` of a checkpoint into ``folder``, verified, and write the manifest last.

    Shards that an earlier call fetched are not fetched again. Independently of the manifest, no more bytes are
    requested than those of ``wanted`` and their headers.

    Args:
        manifest: the checkpoint's manifest, if it is known.
        mirrors: checkpoints of other authors with the same shards. Each shard is fetched from the fastest source.
        concurrency: number of parts that are fetched at once.

    Raises:
        StateError: it is not a checkpoint of that window and version, or does not hold ``wanted``.
        StoreError: as ``download_file``.
    """
    sources, speeds = {one.author.hotkey: one for one in (checkpoint, *mirrors)}, SourceSpeeds()
    manifest = manifest or await fetch_manifest(checkpoint, max_bytes=manifest_cap(wanted))
    mine = await asyncio.to_thread(part_of, manifest, wanted, values=manifest.values)
    for shard in mine.shards:
        path = folder / shard.name
        if not await asyncio.to_thread(_is_whole, folder, manifest, shard):
            await _fetch_shard(sources, shard, path, speeds, concurrency)
            await asyncio.to_thread(check_head, folder, manifest, shard)
    await asyncio.to_thread(write_manifest, folder, mine)
    return mine


async def _fetch_shard(
    sources: Mapping[str, Checkpoint], shard: SnapshotShard, path: Path, speeds: SourceSpeeds, concurrency: int
) -> None:
    """Download a shard from the fastest source; from the next one if that fails, or is slower than another has been.

    Parts that arrived are kept. Each source that is given up as too slow doubles the time of the next, because this
    node's own link may be slow; it is tried again if all others fail. That attempt, and the first one of the last
    source, have the time of ``download_file``.
    """
    clock = asyncio.get_running_loop().time
    unasked, given_up = speeds.order(sources), list[str]()
    while unasked or given_up:
        owner = (unasked or given_up).pop(0)
        expected = speeds.expected(unasked) / 2 ** len(given_up)
        began, source = clock(), sources[owner]
        try:
            await download_file(
                source.store,
                source.prefix + shard.name,
                path,
                size=shard.size,
                blake3s=shard.blake3s,
                deadline_seconds=SLOW_SECONDS + shard.size / expected if expected > FLOOR else None,
                concurrency=concurrency,
            )
        except StoreError as error:
            speeds.note(owner, size=0, seconds=clock() - began)
            if isinstance(error, StoreUnavailable) and expected > FLOOR:
                given_up.append(owner)
            if not unasked and not given_up:
                raise
            logger.info("%s of uid %d: %s", shard.name, source.uid, error)
        else:
            speeds.note(owner, size=shard.size, seconds=clock() - began)
            return


async def alike(
    found: Sequence[Checkpoint], used: UsedPart, electors: Electors, *, max_bytes: int = MAX_MANIFEST_BYTES
) -> list[Copies]:
    """Group checkpoints of one window of which the same is ``used``; the group with the most stake comes first.

    Those without a readable manifest, or for which ``used`` raises StateError, are each alone, and have no manifest:
    who fetches them gets the error.

    Args:
        max_bytes: of a manifest.
    """
    if len(found) == 1:
        return [Copies([*found])]

    async def part(checkpoint: Checkpoint) -> SnapshotManifest | None:
        try:
            manifest = await fetch_manifest(checkpoint, max_bytes=max_bytes)
            # Other values may take much memory: only the part is kept.
            return await asyncio.to_thread(lambda: used(manifest).sealed())
        except (StateError, StoreError):
            return None

    groups: dict[str, Copies] = {}
    parts = await for_each(found, part, concurrency=MANIFESTS_AT_ONCE)
    for checkpoint, manifest in zip(found, parts, strict=True):
        key = manifest.seal if manifest else checkpoint.author.hotkey
        groups.setdefault(key, Copies([], manifest)).checkpoints.append(checkpoint)
    return sorted(groups.values(), key=lambda group: -electors.stake(one.uid for one in group.checkpoints))


def part_of(
    manifest: SnapshotManifest, wanted: Mapping[str, TensorLayout], *, values: Collection[str] = ()
) -> SnapshotManifest:
    """Return the manifest with only the tensors ``wanted`` and these values. Raises StateError as ``needed_shards``."""
    return manifest.model_copy(
        update={
            "shards": needed_shards(manifest, wanted),
            "tensors": {name: manifest.tensors[name] for name in sorted(wanted)},
            "values": {name: manifest.values[name] for name in values if name in manifest.values},
        }
    )


def discard_fetch(folder: Path) -> None:
    """Remove the files of an unfinished fetch into ``folder``."""
    for path in folder.glob("shard-*.safetensors*"):
        name = re.sub(r"\.safetensors.*", ".safetensors", path.name)
        discard_download(folder / name)
        (folder / name).unlink(missing_ok=True)


def needed_shards(manifest: SnapshotManifest, wanted: Mapping[str, TensorLayout]) -> tuple[SnapshotShard, ...]:
    """Return the shards that hold ``wanted``.

    Raises:
        StateError: a tensor is missing, incomplete, or has another layout, or a shard also holds other tensors.
    """
    for name, layout in wanted.items():
        if manifest.tensors.get(name) != layout:
            found = manifest.tensors.get(name)
            raise StateError(f"checkpoint of window {manifest.window}: {name} is {found}, expected {layout}")
    if gap := manifest.covers(wanted):
        raise StateError(f"checkpoint of window {manifest.window}: {gap}")
    shards = tuple(shard for shard in manifest.shards if any(piece.tensor in wanted for piece in shard.pieces))
    if len({shard.name for shard in shards}) != len(shards):
        raise StateError(f"checkpoint of window {manifest.window}: two shards have the same name")
    for shard in shards:
        others = [piece.tensor for piece in shard.pieces if piece.tensor not in wanted]
        if others:
            name = printable(others[0][:80])
            raise StateError(f"checkpoint of window {manifest.window}: {shard.name} also holds {name}")
        head = len(shard_head(manifest.tensors, shard.pieces))
        data = sum(piece.rows * manifest.tensors[piece.tensor].row_bytes for piece in shard.pieces)
        if head > MAX_HEAD_BYTES or shard.size != head + data:
            raise StateError(f"checkpoint of window {manifest.window}: {shard.name} has {shard.size} bytes, not {data}")
    return shards


async def withdraw(store: ObjectStore, *, uid: int, after: int, version: str) -> None:
    """Delete ``uid``'s checkpoints of windows above ``after``, manifests first. Raises StoreError."""
    keys = [
        info.key
        for info in await list_objects(store, "checkpoint-")
        if (key := parse_window_key(info.key, version)) and key.uid == uid and key.window > after
    ]
    manifests = [key for key in keys if key.endswith(f"/{MANIFEST}")]
    await delete_many(store, manifests)
    await delete_many(store, [key for key in keys if key not in manifests])


async def _holds(store: ObjectStore, key: str, path: Path) -> bool:
    """Return whether an object equals this file, by its ETag: a killed process may have stored a different one."""
    info = await with_retry(lambda: store.head(key), deadline_seconds=HEAD_SECONDS)
    return info.etag == await asyncio.to_thread(etag_of, store, path)


def _is_whole(folder: Path, manifest: SnapshotManifest, shard: SnapshotShard) -> bool:
    try:
        check_shards(folder, manifest, [shard])
    except (StateError, ObjectNotFound):
        return False
    return True
