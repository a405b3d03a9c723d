"""Caches tokens of pages: in memory, and on disk if a folder is given."""

import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from tplr.disk_cache import DiskCache
from tplr.tokenize.ragged import Ids


class TokenCache:
    """Maps keys to int32 tokens. Threads may share a cache, and processes a folder. Blocks if there is a folder.

    Args:
        memory_bytes: maximum size of tokens kept in memory; the least recently used are dropped.
        folder: folder of a ``DiskCache`` with the tokens as little-endian int32, or None.
        disk_bytes: maximum size of the tokens in the folder.
    """

    def __init__(
        self, *, memory_bytes: int = 64 * 2**20, folder: Path | None = None, disk_bytes: int = 16 * 2**30
    ) -> None:
        self._memory_bytes = memory_bytes
        self._disk = DiskCache(folder, max_bytes=disk_bytes) if folder else None
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Ids | None:
        """Return the tokens, read-only, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = self._disk.read(key) if self._disk else None
        if data is None:
            return None
        tokens = np.frombuffer(data, "<i4")
        self._keep(key, tokens)
        return tokens

    def put(self, key: str, tokens: Ids) -> None:
        """Cache tokens. Marks the array read-only."""
        tokens = np.ascontiguousarray(tokens, "<i4")
        tokens.flags.writeable = False
        self._keep(key, tokens)
        if self._disk:
            self._disk.write(key, tokens.tobytes())

    def _keep(self, key: str, tokens: Ids) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = tokens
                self._bytes += tokens.nbytes
            while self._bytes > self._memory_bytes:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
