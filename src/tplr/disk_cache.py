"""A checked disk cache: content by key in a folder that threads and processes share."""

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tplr.errors import StateError
from tplr.files import atomic_write
from tplr.logging import logger

_DIGEST_BYTES = 32
_TRIM_SHARE = 16  # the folder is trimmed whenever this fraction of its bound has been written
_STALE_DRAFT_SECONDS = 3600


class _CachedFile(NamedTuple):
    """A file of the cache, ordered by its last use."""

    used_ns: int
    size: int
    path: Path


class DiskCache:
    """Stores bytes by key, bounded in size. Least recently used files are removed first. Every call blocks.

    A file is the SHA-256 of its key and content, then the content. Damaged files, and files of another key, are
    removed with a warning and count as absent. A folder that can't be read or written costs a warning only. A file that
    is removed while it is read is read to its end.

    Args:
        folder: used by this cache alone; made at the first write.
        max_bytes: of all contents together. Each further process that writes may exceed it by a sixteenth.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._until_trim = 0  # bytes
        self._checked: set[str] = set()  # keys whose file this process has read or written whole
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        """Return the file of a key, which is a text of at least two letters or digits."""
        return self._folder / key[:2] / f"{key}.bin"

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read bytes ``[start, stop)`` of a key's content, by default all; None if the key is absent.

        The first read in a process, and every read without ``stop``, checks the whole file.
        """
        path = self.path(key)
        try:
            with path.open("rb") as file:
                content = None
                if stop is not None and key in self._checked:
                    content = os.pread(file.fileno(), stop - start, _DIGEST_BYTES + start)
                    if len(content) < stop - start:  # it may have been cut off
                        content = None
                if content is None:
                    digest, content = file.read(_DIGEST_BYTES), file.read()
                    if digest != _digest(key, content):
                        logger.warning("the cache file %s is damaged and is downloaded again", path)
                        path.unlink(missing_ok=True)
                        return None
                    self._checked.add(key)
                    content = content[start:stop]
                with contextlib.suppress(OSError):  # another account's file, or a read-only file system
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the cache file %s can't be read: %s", path, error)
            return None
        return content

    def write(self, key: str, content: bytes) -> None:
        """Store a key's content; replaces an older one."""
        try:
            atomic_write(self.path(key), _digest(key, content) + content)
        except StateError as error:
            logger.warning("not cached: %s", error)
            return
        self._checked.add(key)
        with self._lock:
            self._until_trim -= len(content)
            if self._until_trim >= 0:
                return
            self._until_trim = self._max_bytes // _TRIM_SHARE
        self._trim()

    def _trim(self) -> None:
        """Remove the least recently used files until the others leave a sixteenth free. Other processes may do so too.

        Drafts that a killed process left an hour ago are removed as well.
        """
        files: list[_CachedFile] = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix != ".tmp":
                    files.append(_CachedFile(status.st_mtime_ns, max(status.st_size - _DIGEST_BYTES, 0), path))
                elif time.time() - status.st_mtime > _STALE_DRAFT_SECONDS:
                    path.unlink()
        excess = sum(file.size for file in files) - (self._max_bytes - self._max_bytes // _TRIM_SHARE)
        for file in sorted(files):
            if excess <= 0:
                break
            try:
                file.path.unlink(missing_ok=True)
            except OSError:  # another account's: the next ones go instead
                continue
            self._checked.discard(file.path.stem)
            excess -= file.size


def _digest(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()
