"""An object store in memory, for tests and simulations."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tplr.errors import ObjectNotFound
from tplr.files import atomic_write
from tplr.schemas import ObjectInfo
from tplr.storage.base import (
    Sink,
    already_there,
    check_key,
    check_metadata,
    check_put_size,
    select_piece,
    select_range,
    whole_seconds,
)
from tplr.storage.local_files import disk_errors


class MemoryStore:
    """An ``ObjectStore`` in a dictionary. Every call yields to other tasks, as a network call does.

    Args:
        name: of the bucket, in errors.
        clock: gives the unix seconds that become ``last_modified``.
    """

    def __init__(self, name: str = "memory", *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def multipart(self) -> None:
        return None

    async def _find(self, key: str) -> tuple[ObjectInfo, bytes]:
        check_key(key)
        await asyncio.sleep(0)
        if key not in self._objects:
            raise ObjectNotFound("no such object", bucket=self._name, key=key)
        return self._objects[key]

    async def head(self, key: str) -> ObjectInfo:
        info, _ = await self._find(key)
        return replace(info, metadata=dict(info.metadata))

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> bytes:
        info, data = await self._find(key)
        start, stop = select_range(info, max_bytes, if_match, byte_range, bucket=self._name)
        return data[start:stop]

    async def receive(
        self,
        key: str,
        sink: Sink,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> ObjectInfo:
        info, data = await self._find(key)
        start, stop = select_range(info, max_bytes, if_match, byte_range, bucket=self._name)
        await asyncio.to_thread(sink, memoryview(data)[start:stop])
        return replace(info, metadata=dict(info.metadata))

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None
    ) -> tuple[ObjectInfo, bytes]:
        info, data = await self._find(key)
        start, stop = select_piece(info, start, max_bytes, if_match, bucket=self._name)
        return replace(info, metadata=dict(info.metadata)), data[start:stop]

    async def put(
        self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        check_key(key)
        checked = check_metadata(metadata)
        check_put_size(len(data), bucket=self._name, key=key)
        await asyncio.sleep(0)
        if create_only and key in self._objects:
            raise already_there(self._name, key)
        info = ObjectInfo(
            key=key,
            size=len(data),
            etag=hashlib.md5(data, usedforsecurity=False).hexdigest(),
            last_modified=whole_seconds(self._clock()),
            metadata=checked,
        )
        self._objects[key] = (info, bytes(data))
        return replace(info, metadata=dict(checked))

    async def get_file(self, key: str, path: Path, *, max_bytes: int, if_match: str | None = None) -> ObjectInfo:
        info, data = await self._find(key)
        select_range(info, max_bytes, if_match, None, bucket=self._name)
        with disk_errors(self._name, key):
            await asyncio.to_thread(atomic_write, path, data)
        return replace(info, metadata=dict(info.metadata))

    async def put_file(
        self, key: str, path: Path, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        with disk_errors(self._name, key):
            data = await asyncio.to_thread(path.read_bytes)
        return await self.put(key, data, metadata=metadata, create_only=create_only)

    async def delete(self, key: str) -> None:
        check_key(key)
        await asyncio.sleep(0)
        self._objects.pop(key, None)

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        await asyncio.sleep(0)
        keys = sorted(key for key in self._objects if key.startswith(prefix) and key > start_after)
        return [replace(self._objects[key][0], metadata={}) for key in keys[:limit]]
