"""Reads byte ranges of a store's files in a bucket, block by block, through the cache; checks each block's hash."""

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from tplr.disk_cache import DiskCache
from tplr.errors import DataError
from tplr.storage.base import ObjectStore
from tplr.storage.many import for_each
from tplr.storage.replicas import Replicas
from tplr.stores.meta import FileMeta

TRANSFERS = 8
ATTEMPTS = 2  # a block damaged in transit is correct the second time


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """A file in a bucket, as its shard's ``meta.json`` describes it."""

    key: str
    meta: FileMeta
    block_bytes: int

    def blocks(self, start: int, stop: int) -> range:
        """Numbers of the blocks that hold bytes ``[start, stop)``."""
        return range(start // self.block_bytes, -(-stop // self.block_bytes) if stop > start else 0)

    def span(self, block: int) -> tuple[int, int]:
        """Bytes ``[start, stop)`` of a block."""
        return block * self.block_bytes, min((block + 1) * self.block_bytes, self.meta.bytes)


@dataclass(frozen=True)
class FileRange:
    """Bytes ``[start, stop)`` of a file."""

    file: RemoteFile
    start: int
    stop: int


class BlockReader:
    """Reads blocks, ``transfers`` of them at once; belongs to one event loop."""

    def __init__(self, replicas: Replicas, cache: DiskCache, transfers: int = TRANSFERS) -> None:
        self._replicas = replicas
        self._cache = cache
        self._transfers = transfers
        self._fetching: dict[str, asyncio.Lock] = {}

    async def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of a file.

        Raises:
            DataError: the bucket holds other bytes than the store's meta says.
            StoreError: the bucket can't be read.
        """

        async def one(block: int) -> bytes:
            first, last = file.span(block)
            return await self._block(file, block, max(start, first) - first, min(stop, last) - first)

        return b"".join(await for_each(file.blocks(start, stop), one, concurrency=self._transfers))

    async def prefetch(self, ranges: Iterable[FileRange]) -> None:
        """Fetch all blocks of some ranges into the cache. Raises as ``read``."""
        wanted = dict.fromkeys((one.file, block) for one in ranges for block in one.file.blocks(one.start, one.stop))

        async def one(which: tuple[RemoteFile, int]) -> None:
            await self._block(*which, 0, 0)

        await for_each(wanted, one, concurrency=self._transfers)

    async def _block(self, file: RemoteFile, block: int, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of a block; concurrent readers of one block cause one request."""
        sha256 = file.meta.blocks[block]
        async with self._fetching.setdefault(sha256, asyncio.Lock()):
            found = await asyncio.to_thread(self._cache.read, sha256, start, stop)
            if found is None:
                whole = await self._fetch(file, block)
                await asyncio.to_thread(self._cache.write, sha256, whole)
                found = whole[start:stop]
        self._fetching.pop(sha256, None)
        return found

    async def _fetch(self, file: RemoteFile, block: int) -> bytes:
        start, stop = file.span(block)

        async def ask(store: ObjectStore) -> bytes:
            for _ in range(ATTEMPTS):
                data = await store.get(file.key, max_bytes=stop - start, byte_range=(start, stop))
                if (await asyncio.to_thread(hashlib.sha256, data)).hexdigest() == file.meta.blocks[block]:
                    return data
            raise DataError(
                f"{store.name}/{file.key}: bytes {start} to {stop} do not match its meta.json: verify "
                "the store, and upload it again"
            )

        return await self._replicas.ask(ask)
