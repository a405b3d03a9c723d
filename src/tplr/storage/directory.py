"""An object store in a folder: every object is one file with a line of JSON followed by the bytes.

One file holds both, because one rename must make both visible. The file name is the percent-encoded key, so different
keys have different files, and no key leads out of the folder.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from tplr.errors import AccessDenied, ObjectNotFound, StateError, StoreError
from tplr.files import atomic_writer
from tplr.schemas import ObjectInfo
from tplr.storage.base import CHUNK_BYTES, already_there, whole_seconds
from tplr.storage.local_files import disk_error
from tplr.storage.local_store import LocalStore

_SUFFIX = ".object"
# File systems allow 255 bytes, and the temporary file's name is longer.
_MAX_NAME = 215
_MAX_HEADER = 16384
# Name of ``atomic_writer``'s temporary files. A file older than this limit has no writer any more.
_DRAFT = re.compile(r".*\.object\.\d+-[0-9a-f]{8}\.tmp")
_ABANDONED_SECONDS = 3600.0


class DirectoryStore(LocalStore):
    """An ``ObjectStore`` over a local folder, safe for concurrent use by several processes.

    Args:
        root: created by the first put.

    Keys are limited to 215 bytes, percent-encoded.
    """

    verifies = True

    def __init__(self, root: Path) -> None:
        super().__init__(root.name)
        self._root = root

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        if len(name) > _MAX_NAME:
            raise StoreError(
                f"the key's file name has {len(name)} bytes; a folder holds at most {_MAX_NAME}",
                bucket=self.name,
                key=key,
            )
        return self._root / (name + _SUFFIX)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise file system errors of the block as store errors."""
        try:
            yield
        except (OSError, StateError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            match cause:
                case FileNotFoundError():
                    raise ObjectNotFound("no such object", bucket=self.name, key=key) from error
                case FileExistsError() if cause is error:
                    raise already_there(self.name, key) from error
                case PermissionError():
                    raise AccessDenied(f"{cause.strerror}: {self._root}", bucket=self.name, key=key) from error
                case OSError():
                    raise disk_error(cause, self.name, key) from error
            raise

    def _open(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._path(key).open("rb"))
            info = self._read_header(key, file)
            stack.pop_all()
            return info, file

    def _read_header(self, key: str, file: BinaryIO) -> ObjectInfo:
        line = file.readline(_MAX_HEADER)
        try:
            header = json.loads(line)
            etag, metadata = header["etag"], header["metadata"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError("not a file of this store; remove it", bucket=self.name, key=key) from error
        status = os.fstat(file.fileno())
        return ObjectInfo(
            key=key,
            size=status.st_size - len(line),
            etag=etag,
            last_modified=whole_seconds(status.st_mtime),
            metadata=metadata,
        )

    def _put(self, key: str, source: BinaryIO, metadata: dict[str, str], create_only: bool) -> ObjectInfo:
        digest = hashlib.md5(usedforsecurity=False)
        size = 0
        with atomic_writer(self._path(key), create_only=create_only) as file:
            file.write(_header(digest.hexdigest(), metadata))
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                size += file.write(chunk)
            file.seek(0)
            # The header keeps its length, because an MD5 always has 32 digits.
            file.write(_header(digest.hexdigest(), metadata))
            file.flush()
            modified = os.fstat(file.fileno()).st_mtime
        return ObjectInfo(
            key=key, size=size, etag=digest.hexdigest(), last_modified=whole_seconds(modified), metadata=metadata
        )

    def _remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _keys(self, prefix: str) -> list[str]:
        try:
            names = [entry.name for entry in os.scandir(self._root)]
        except FileNotFoundError:
            return []
        self._remove_drafts(names)
        return [unquote(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX)]

    def _remove_drafts(self, names: Iterable[str]) -> None:
        """Remove the temporary files of killed processes."""
        for path in (self._root / name for name in names if _DRAFT.fullmatch(name)):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()


def _header(etag: str, metadata: dict[str, str]) -> bytes:
    return json.dumps({"etag": etag, "metadata": metadata}).encode() + b"\n"
