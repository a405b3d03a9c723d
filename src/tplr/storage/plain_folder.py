"""A folder of plain files as a read-only object store; a key is a path below the folder."""

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tplr.errors import AccessDenied, ObjectNotFound
from tplr.files import atomic_writer
from tplr.schemas import ObjectInfo
from tplr.storage.base import CHUNK_BYTES, Sink, check_key, select_piece, select_range, whole_seconds
from tplr.storage.local_files import disk_errors


class PlainFolder:
    """A read-only ``ObjectStore``; writing raises AccessDenied.

    An ETag is the file's size and modification time. It changes when the file is replaced, and verifies no bytes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def name(self) -> str:
        return str(self._root)

    @property
    def multipart(self) -> None:
        return None

    async def head(self, key: str) -> ObjectInfo:
        return await asyncio.to_thread(self._head, key)

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> bytes:
        body = bytearray()
        await self.receive(key, body.extend, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range)
        return bytes(body)

    async def receive(
        self,
        key: str,
        sink: Sink,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> ObjectInfo:
        info = await self.head(key)
        start, stop = select_range(info, max_bytes, if_match, byte_range, bucket=self.name)
        for position in range(start, stop, CHUNK_BYTES):
            data = await asyncio.to_thread(self._read, info, position, min(position + CHUNK_BYTES, stop))
            await asyncio.to_thread(sink, memoryview(data))
        return info

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None
    ) -> tuple[ObjectInfo, bytes]:
        info = await self.head(key)
        start, stop = select_piece(info, start, max_bytes, if_match, bucket=self.name)
        return info, await asyncio.to_thread(self._read, info, start, stop)

    async def get_file(self, key: str, path: Path, *, max_bytes: int, if_match: str | None = None) -> ObjectInfo:
        info = await self.head(key)
        select_range(info, max_bytes, if_match, None, bucket=self.name)
        await asyncio.to_thread(self._copy, key, path)
        return info

    def _list(self, prefix: str, start_after: str, limit: int | None) -> list[ObjectInfo]:
        with disk_errors(self.name, prefix):
            keys = sorted(
                Path(folder, name).relative_to(self._root).as_posix()
                for folder, _, names in os.walk(self._root / prefix.rpartition("/")[0])
                for name in names
            )
        found = [key for key in keys if key.startswith(prefix) and key > start_after]
        return [self._head(key) for key in found[:limit]]

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        return await asyncio.to_thread(self._list, prefix, start_after, limit)

    async def put(
        self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        self._refuse(key)

    async def put_file(
        self, key: str, path: Path, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        self._refuse(key)

    async def delete(self, key: str) -> None:
        self._refuse(key)

    def _refuse(self, key: str) -> NoReturn:
        raise AccessDenied("this folder is only read", bucket=self.name, key=key)

    def _head(self, key: str) -> ObjectInfo:
        check_key(key)
        with disk_errors(self.name, key):
            path = self._root / key
            if not path.is_file():
                raise ObjectNotFound("no such file", bucket=self.name, key=key)
            status = path.stat()
        etag = f"{status.st_size:x}-{status.st_mtime_ns:x}"
        return ObjectInfo(key=key, size=status.st_size, last_modified=whole_seconds(status.st_mtime), etag=etag)

    def _read(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        with disk_errors(self.name, info.key), (self._root / info.key).open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
            if len(data) < stop - start:
                raise OSError(f"truncated to {start + len(data)} of {info.size} bytes while it was read")
        return data

    def _copy(self, key: str, path: Path) -> None:
        with disk_errors(self.name, key), (self._root / key).open("rb") as source, atomic_writer(path) as copy:
            shutil.copyfileobj(source, copy)
