"""Base class of stores on this machine: a subclass opens, writes, removes and lists objects."""

import asyncio
import contextlib
import io
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from tplr.errors import ObjectNotFound, StoreUnavailable
from tplr.schemas import ObjectInfo
from tplr.storage.base import (
    CHUNK_BYTES,
    ObjectStore,
    Sink,
    check_key,
    check_metadata,
    select_piece,
    select_range,
)
from tplr.storage.local_files import disk_errors
from tplr.storage.parts import md5_hex

T = TypeVar("T")


class LocalStore(ObjectStore):
    """An ``ObjectStore`` over objects that can be opened as files. Its abstract methods block and may raise OSError."""

    # Whether ETags are MD5s, and the bytes may be damaged.
    verifies = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def _open(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        """Open one version of an object, positioned at its first byte; later puts do not change it."""

    @abstractmethod
    def _keys(self, prefix: str) -> Iterable[str]:
        """Return all keys with ``prefix``, and possibly others."""

    @abstractmethod
    def _put(self, key: str, source: BinaryIO, metadata: dict[str, str], create_only: bool) -> ObjectInfo:
        """Store the content of ``source``."""

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Delete an object, if there is one."""

    def _errors(self, key: str) -> AbstractContextManager[None]:
        """Raise file system errors of the block as store errors."""
        return disk_errors(self.name, key)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a blocking function without blocking the event loop."""
        return await asyncio.to_thread(function, *arguments)

    def _find(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        check_key(key)
        with self._errors(key):
            return self._open(key)

    @contextlib.asynccontextmanager
    async def _opened(self, key: str) -> AsyncIterator[tuple[ObjectInfo, BinaryIO]]:
        info, file = await self._run(self._find, key)
        with file:
            yield info, file

    async def _read(self, info: ObjectInfo, file: BinaryIO, size: int) -> bytes:
        with self._errors(info.key):
            data = await self._run(file.read, size)
        if len(data) < size:
            raise StoreUnavailable(f"truncated: {len(data)} of {size} bytes read", bucket=self.name, key=info.key)
        return data

    async def head(self, key: str) -> ObjectInfo:
        async with self._opened(key) as (info, _):
            return info

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> bytes:
        async with self._opened(key) as (info, file):
            start, stop = select_range(info, max_bytes, if_match, byte_range, bucket=self.name)
            file.seek(start, os.SEEK_CUR)
            data = await self._read(info, file, stop - start)
        if self.verifies and verify and byte_range is None and await self._run(md5_hex, data) != info.etag:
            raise StoreUnavailable("the file is damaged", bucket=self.name, key=key)
        return data

    async def receive(
        self,
        key: str,
        sink: Sink,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> ObjectInfo:
        async with self._opened(key) as (info, file):
            start, stop = select_range(info, max_bytes, if_match, byte_range, bucket=self.name)
            file.seek(start, os.SEEK_CUR)
            for position in range(start, stop, CHUNK_BYTES):
                data = await self._read(info, file, min(CHUNK_BYTES, stop - position))
                await asyncio.to_thread(sink, memoryview(data))
            return info

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None
    ) -> tuple[ObjectInfo, bytes]:
        async with self._opened(key) as (info, file):
            start, stop = select_piece(info, start, max_bytes, if_match, bucket=self.name)
            file.seek(start, os.SEEK_CUR)
            return info, await self._read(info, file, stop - start)

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        content_type: str = "",
    ) -> ObjectInfo:
        return await self._store(key, io.BytesIO(data), metadata, create_only)

    async def put_file(
        self, key: str, path: Path, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        with disk_errors(self.name, key):
            source = await asyncio.to_thread(path.open, "rb")
        with source:
            return await self._store(key, source, metadata, create_only)

    async def _store(
        self, key: str, source: BinaryIO, metadata: Mapping[str, str] | None, create_only: bool
    ) -> ObjectInfo:
        check_key(key)
        with self._errors(key):
            return await self._run(self._put, key, source, check_metadata(metadata), create_only)

    async def delete(self, key: str) -> None:
        check_key(key)
        with self._errors(key):
            await self._run(self._remove, key)

    def _list(self, prefix: str, start_after: str, limit: int | None) -> list[ObjectInfo]:
        with disk_errors(self.name, prefix):
            keys = sorted(key for key in self._keys(prefix) if key.startswith(prefix) and key > start_after)
        found: list[ObjectInfo] = []
        for key in keys:
            if len(found) == limit:
                break
            with contextlib.suppress(ObjectNotFound):  # deleted meanwhile
                info, file = self._find(key)
                file.close()
                found.append(replace(info, metadata={}))
        return found

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        return await self._run(self._list, prefix, start_after, limit)
