"""``BucketStore`` reads a store directly from a bucket, block by block."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from tplr.disk_cache import DiskCache
from tplr.errors import DataError
from tplr.pages.fetch_manifest import MAX_MANIFEST_BYTES
from tplr.storage.base import ObjectStore
from tplr.storage.replicas import Replicas
from tplr.stores.base import ShardKey, StoreShard, TokenStore
from tplr.stores.blocks import TRANSFERS, BlockReader, FileRange, RemoteFile
from tplr.stores.detect import META, natural
from tplr.stores.expected_files import expected_files, list_prefix
from tplr.stores.meta import KeyMeta, Meta, ShardMeta, check_size, parse_meta
from tplr.stores.token_stream import Array

CACHE_BYTES = 16 * 2**30

Read = Callable[[RemoteFile, int, int], bytes]


class RemoteShard:
    """A shard in a bucket: its meta, and its files by name."""

    def __init__(self, prefix: str, path: str, data: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.meta: Meta = parse_meta(data, path)
        if self.meta.shard is None:
            raise DataError(f"{path}: the bare form has no hashes: a bucket store requires the rich form")
        self.shard: ShardMeta = self.meta.shard
        folder = path.removesuffix(META)
        self.files = {
            file.path: RemoteFile(f"{prefix}/{folder}{file.path}", file, self.shard.block_bytes)
            for file in self.shard.files
        }


async def list_shards(replicas: Replicas, prefix: str) -> list[RemoteShard]:
    """List the shards of a store below ``prefix``, in natural order.

    Raises:
        DataError: there is no shard, a shard is incomplete, or a shard named by a preparation's report is missing.
        StoreError: the bucket can't be read.
    """

    async def ask(store: ObjectStore) -> list[RemoteShard]:
        there = await list_prefix(store, prefix)
        expected = await expected_files(store, prefix, there)
        if problems := [problem for file in expected.files if (problem := file.mismatch(there))]:
            raise DataError(f"{store.name}/{prefix} is incomplete: {'; '.join(problems[:3])}")
        shards = [
            RemoteShard(prefix, path, await store.get(f"{prefix}/{path}", max_bytes=MAX_MANIFEST_BYTES))
            for path in sorted(expected.manifests, key=natural)
            if PurePosixPath(path).name == META
        ]
        named = {file.path: file.sha256 for file in expected.files}
        if foreign := [shard.path for shard in shards if named.get(shard.path, shard.sha256) != shard.sha256]:
            raise DataError(f"{store.name}/{prefix}: {foreign[0]} does not match the one that its preparation wrote")
        return shards

    return await replicas.ask(ask)


class BucketStore(TokenStore):
    """A store of format ``bin`` in a bucket. Every block is checked against its hash and cached on the local disk.

    All reading methods block until the bytes are fetched: call them in a thread where an event loop runs.

    Args:
        read: a blocking version of ``BlockReader.read``.

    Attributes:
        sha256: see ``store_sha256``.

    Raises:
        DataError: another format, or shards that contradict themselves.
    """

    def __init__(self, shards: Sequence[RemoteShard], read: Read) -> None:
        super().__init__()
        self.sha256 = store_sha256(shards)
        self._take([_shard(shard, read) for shard in shards], "the bucket")

    def _shards(self, path: Path) -> list[StoreShard]:
        raise NotImplementedError(f"a BucketStore already has its shards; {path} can't be loaded into it")

    def places(self, key: str, begin: int, end: int) -> Iterator[FileRange]:
        """The byte ranges that hold elements ``[begin, end)`` of a key."""
        for part in self.stream(key).parts(begin, end):
            assert isinstance(part.segment, RemoteSegment)
            yield part.segment.place(part.begin, part.end)


class RemoteSegment:
    """A flat array in a bucket; slicing it fetches the slice."""

    def __init__(self, file: RemoteFile, key: KeyMeta, read: Read) -> None:
        self._file, self._length, self._read = file, key.elements, read
        self.dtype = np.dtype(key.dtype)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice, /) -> Array:
        place = self.place(where.start, where.stop)
        data = self._read(place.file, place.start, place.stop)
        return np.frombuffer(bytearray(data), self.dtype)  # an array over ``bytes`` would be read-only

    def place(self, begin: int, end: int) -> FileRange:
        """The byte range of elements ``[begin, end)``."""
        return FileRange(self._file, begin * self.dtype.itemsize, end * self.dtype.itemsize)


def _shard(shard: RemoteShard, read: Read) -> StoreShard:
    if shard.shard.format != "bin":
        raise DataError(
            f"{shard.path}: format {shard.shard.format} can't be read in parts: fetch it, or prepare it as bin"
        )
    keys = {}
    for name, key in shard.meta.keys.items():
        file = shard.files.get(f"{name}.bin")
        if file is None:
            raise DataError(f"{shard.path}: names no file {name}.bin")
        check_size(file.key, file.meta.bytes, key)
        keys[name] = ShardKey([RemoteSegment(file, key, read)], key.offsets, key.groups)
    return StoreShard(shard.path, keys)


def store_sha256(shards: Sequence[RemoteShard]) -> str:
    """Return the hex SHA-256 over a line ``path:hash`` per ``meta.json``; these hold the hashes of all other files."""
    return hashlib.sha256("".join(f"{shard.path}:{shard.sha256}\n" for shard in shards).encode()).hexdigest()


async def open_bucket_store(
    stores: Sequence[ObjectStore], prefix: str, cache: DiskCache, transfers: int = TRANSFERS
) -> tuple[BucketStore, BlockReader]:
    """Open a store from a running event loop, which then fetches its bytes; ``stores`` are replicas.

    Call the reader's ``prefetch`` with the ranges that are needed next: it fetches ``transfers`` blocks concurrently.

    Raises:
        DataError: it is not a store of format ``bin``.
        StoreError: the bucket can't be read.
    """
    replicas, loop = Replicas(stores, concurrency=transfers), asyncio.get_running_loop()
    reader = BlockReader(replicas, cache, transfers)

    def read(file: RemoteFile, start: int, stop: int) -> bytes:
        return asyncio.run_coroutine_threadsafe(reader.read(file, start, stop), loop).result()

    return BucketStore(await list_shards(replicas, prefix), read), reader
