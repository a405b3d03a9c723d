"""Tokens of pages that were read before: the last ones in memory, and on disk for as many as are allowed there."""

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from tplr.errors import StateError
from tplr.files import atomic_write
from tplr.logging import logger
from tplr.tokenize.ragged import Ids

_DIGEST_BYTES = 32
_SUFFIX = ".tokens"


class TokenCache:
    """Key -> int32 tokens. Threads may share one, and processes a folder; blocking where there is one.

    A file holds the SHA-256 of what follows, then little-endian int32; one that does not fit is removed.

    Args:
        memory_bytes: of tokens kept in memory; those asked for last stay.
        folder: where tokens are kept too, or None.
        disk_bytes: of files in the folder; the oldest are removed beyond.
    """

    def __init__(
        self, *, memory_bytes: int = 64 * 2**20, folder: Path | None = None, disk_bytes: int = 16 * 2**30
    ) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._disk_bytes = disk_bytes
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._bytes = 0
        self._written = 0  # bytes since the folder was last looked through
        self._lock = threading.Lock()

    def get(self, key: str) -> Ids | None:
        """The tokens, read-only, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if self._folder is None:
            return None
        tokens = _read(self._path(self._folder, key))
        if tokens is not None:
            self._keep(key, tokens)
        return tokens

    def put(self, key: str, tokens: Ids) -> None:
        """Keep tokens, which nobody changes any more. A disk that takes none costs only time: that is logged."""
        tokens = np.ascontiguousarray(tokens, "<i4")
        tokens.flags.writeable = False
        self._keep(key, tokens)
        if self._folder is None:
            return
        body = tokens.tobytes()
        try:
            atomic_write(self._path(self._folder, key), hashlib.sha256(body).digest() + body)
        except StateError as error:
            logger.warning("token cache: %s", error)
            return
        with self._lock:
            first = not self._written
            self._written += len(body)
            if not first and self._written < self._disk_bytes // 16:
                return
            self._written = 1
        _shrink(self._folder, self._disk_bytes)

    def _keep(self, key: str, tokens: Ids) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = tokens
                self._bytes += tokens.nbytes
            while self._bytes > self._memory_bytes:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}{_SUFFIX}"


def _read(path: Path) -> Ids | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = memoryview(data)[_DIGEST_BYTES:]
    if len(body) % 4 or hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
        logger.warning("token cache: %s is damaged; its page is tokenized again", path)
        path.unlink(missing_ok=True)
        return None
    return np.frombuffer(body, "<i4")


def _shrink(folder: Path, limit: int) -> None:
    """Remove the oldest files until the others take at most 15/16 of ``limit``; another process may do so too."""
    files = []
    for path in folder.glob(f"*/*{_SUFFIX}"):
        try:
            status = path.stat()
        except OSError:
            continue
        files.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in files) - limit * 15 // 16
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
