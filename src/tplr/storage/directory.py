"""An object store in a folder: every object is one file, a line of JSON and then the bytes.

One file holds both, because one rename must make both visible. A key's file is its percent-encoded name, so keys that
differ never meet, and none leads out of the folder.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from tplr.errors import AccessDenied, ObjectNotFound, StateError, StoreError, StoreUnavailable
from tplr.files import atomic_writer
from tplr.schemas import ObjectInfo
from tplr.storage.base import (
    CHUNK_BYTES,
    Sink,
    already_there,
    check_key,
    check_metadata,
    check_put_size,
    select_piece,
    select_range,
    whole_seconds,
)
from tplr.storage.local_files import disk_error, disk_errors
from tplr.storage.parts import md5_hex

_SUFFIX = ".object"
# File systems allow 255 bytes, and the temporary file's name is longer.
_MAX_NAME = 215
_MAX_HEADER = 16384
# The temporary files of ``atomic_writer``. One that is older than this has no writer any more.
_DRAFT = re.compile(r".*\.object\.\d+-[0-9a-f]{8}\.tmp")
_ABANDONED_SECONDS = 3600.0


class DirectoryStore:
    """An ``ObjectStore`` over a local folder, safe for several processes at once.

    Args:
        root: created by the first put.
        name: of the bucket, in errors; default is the folder's own.

    Keys are limited to 215 bytes, percent-encoded.
    """

    def __init__(self, root: Path, *, name: str | None = None) -> None:
        self._root = root
        self._name = name or root.name

    @property
    def name(self) -> str:
        return self._name

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
        info, data = await asyncio.to_thread(self._get, key, max_bytes, if_match, byte_range)
        if verify and byte_range is None and await asyncio.to_thread(md5_hex, data) != info.etag:
            raise StoreUnavailable("the file is damaged", bucket=self._name, key=key)
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
        info, data = await asyncio.to_thread(self._get, key, max_bytes, if_match, byte_range)
        await asyncio.to_thread(sink, memoryview(data))
        return info

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None
    ) -> tuple[ObjectInfo, bytes]:
        return await asyncio.to_thread(self._get_piece, key, start, max_bytes, if_match)

    async def put(
        self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        check_put_size(len(data), bucket=self._name, key=key)
        return await asyncio.to_thread(self._put, key, io.BytesIO(data), check_metadata(metadata), create_only)

    async def get_file(self, key: str, path: Path, *, max_bytes: int, if_match: str | None = None) -> ObjectInfo:
        return await asyncio.to_thread(self._get_file, key, path, max_bytes, if_match)

    async def put_file(
        self, key: str, path: Path, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        return await asyncio.to_thread(self._put_file, key, path, check_metadata(metadata), create_only)

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors(key):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    def _path(self, key: str) -> Path:
        check_key(key)
        name = quote(key, safe="")
        if len(name) > _MAX_NAME:
            raise StoreError(
                f"the key's file name has {len(name)} bytes; a folder holds at most {_MAX_NAME}",
                bucket=self._name,
                key=key,
            )
        return self._root / (name + _SUFFIX)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise errors of the file system as store errors."""
        try:
            yield
        except (OSError, StateError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            match cause:
                case FileNotFoundError():
                    raise ObjectNotFound("no such object", bucket=self._name, key=key) from error
                case FileExistsError() if cause is error:
                    raise already_there(self._name, key) from error
                case PermissionError():
                    raise AccessDenied(f"{cause.strerror}: {self._root}", bucket=self._name, key=key) from error
                case OSError():
                    raise disk_error(cause, self._name, key) from error
            raise

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[tuple[ObjectInfo, BinaryIO]]:
        """One version of the object, positioned at its first byte; unaffected by later puts."""
        with self._errors(key), self._path(key).open("rb") as file:
            yield self._read_header(key, file), file

    def _read_header(self, key: str, file: BinaryIO) -> ObjectInfo:
        line = file.readline(_MAX_HEADER)
        try:
            header = json.loads(line)
            etag, metadata = header["etag"], header["metadata"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError("not a file of this store: remove it", bucket=self._name, key=key) from error
        status = os.fstat(file.fileno())
        return ObjectInfo(
            key=key,
            size=status.st_size - len(line),
            etag=etag,
            last_modified=whole_seconds(status.st_mtime),
            metadata=metadata,
        )

    def _head(self, key: str) -> ObjectInfo:
        with self._open(key) as (info, _):
            return info

    def _get(
        self, key: str, max_bytes: int, if_match: str | None, byte_range: tuple[int, int] | None
    ) -> tuple[ObjectInfo, bytes]:
        with self._open(key) as (info, file):
            start, stop = select_range(info, max_bytes, if_match, byte_range, bucket=self._name)
            file.seek(start, os.SEEK_CUR)
            return info, file.read(stop - start)

    def _get_piece(self, key: str, start: int, max_bytes: int, if_match: str | None) -> tuple[ObjectInfo, bytes]:
        with self._open(key) as (info, file):
            start, stop = select_piece(info, start, max_bytes, if_match, bucket=self._name)
            file.seek(start, os.SEEK_CUR)
            return info, file.read(stop - start)

    def _get_file(self, key: str, path: Path, max_bytes: int, if_match: str | None) -> ObjectInfo:
        with self._open(key) as (info, file):
            select_range(info, max_bytes, if_match, None, bucket=self._name)
            with disk_errors(self._name, key), atomic_writer(path) as target:
                while chunk := file.read(CHUNK_BYTES):
                    target.write(chunk)
            return info

    def _put(self, key: str, source: BinaryIO, metadata: dict[str, str], create_only: bool) -> ObjectInfo:
        digest = hashlib.md5(usedforsecurity=False)
        size = 0
        with self._errors(key), atomic_writer(self._path(key), create_only=create_only) as file:
            file.write(_header(digest.hexdigest(), metadata))
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                size += file.write(chunk)
            file.seek(0)
            # The same length as before: an MD5 has 32 digits.
            file.write(_header(digest.hexdigest(), metadata))
            file.flush()
            modified = os.fstat(file.fileno()).st_mtime
        return ObjectInfo(
            key=key, size=size, etag=digest.hexdigest(), last_modified=whole_seconds(modified), metadata=metadata
        )

    def _put_file(self, key: str, path: Path, metadata: dict[str, str], create_only: bool) -> ObjectInfo:
        with contextlib.ExitStack() as stack:
            with disk_errors(self._name, key):
                source = stack.enter_context(path.open("rb"))
                check_put_size(os.fstat(source.fileno()).st_size, bucket=self._name, key=key)
            return self._put(key, source, metadata, create_only)

    def _list(self, prefix: str, start_after: str, limit: int | None) -> list[ObjectInfo]:
        try:
            names = [entry.name for entry in os.scandir(self._root)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise disk_error(error, self._name, prefix) from error
        self._remove_drafts(names)
        keys = sorted(unquote(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX))
        found: list[ObjectInfo] = []
        for key in keys:
            if len(found) == limit:
                break
            if key.startswith(prefix) and key > start_after:
                # Deleted since the folder was read.
                with contextlib.suppress(ObjectNotFound):
                    found.append(replace(self._head(key), metadata={}))
        return found

    def _remove_drafts(self, names: Iterable[str]) -> None:
        """Remove the temporary files that a killed process left."""
        for path in (self._root / name for name in names if _DRAFT.fullmatch(name)):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        return await asyncio.to_thread(self._list, prefix, start_after, limit)


def _header(etag: str, metadata: dict[str, str]) -> bytes:
    return json.dumps({"etag": etag, "metadata": metadata}).encode() + b"\n"
