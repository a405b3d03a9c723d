"""Blocks of stores' files on the local disk, each named by its SHA-256, the ones used longest ago given up first."""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from tplr.errors import StateError
from tplr.files import atomic_write
from tplr.logging import logger

KEEP_SHARE = 0.9  # how full the cache is after blocks were given up


class BlockCache:
    """A folder of blocks, for several threads and processes at once.

    A block that was damaged on the disk is noticed when a process first reads it, and is then not there. One that is
    given up while somebody reads it is read to its end.

    Args:
        max_bytes: what the blocks may take; a little more for a moment.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sound: set[str] = set()  # checked by this process
        self._held = self._bytes_held()

    def read(self, sha256: str, start: int, stop: int) -> bytes | None:
        """Bytes ``[start, stop)`` of a block, or None if it is not here."""
        path = self._path(sha256)
        try:
            with path.open("rb") as file:
                if sha256 in self._sound:
                    data = os.pread(file.fileno(), stop - start, start)
                else:
                    block = file.read()
                    if hashlib.sha256(block).hexdigest() != sha256:
                        logger.warning("%s was damaged on this disk: it is fetched again", path)
                        path.unlink(missing_ok=True)
                        return None
                    self._sound.add(sha256)
                    data = block[start:stop]
            os.utime(path)
        except FileNotFoundError:
            return None
        return data

    def write(self, sha256: str, block: bytes) -> None:
        """Keep a block, whose hash was checked; on a disk that is full, do without."""
        try:
            atomic_write(self._path(sha256), block)
        except StateError as error:
            logger.warning("a block is not kept: %s", error)
            return
        self._sound.add(sha256)
        self._held += len(block)
        if self._held > self._max_bytes:
            self._give_up()

    def _give_up(self) -> None:
        """Remove the blocks used longest ago. Other processes may do the same: what is gone is gone."""
        found = sorted((used, size, path) for path, size, used in self._blocks())
        held = sum(size for _, size, _ in found)
        for _, size, path in found:
            if held <= KEEP_SHARE * self._max_bytes:
                break
            path.unlink(missing_ok=True)
            self._sound.discard(path.name)
            held -= size
        self._held = held

    def _bytes_held(self) -> int:
        return sum(size for _, size, _ in self._blocks())

    def _blocks(self) -> list[tuple[Path, int, float]]:
        """Path, bytes and time of use of every block; drafts that a killed process left for an hour are removed."""
        found = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix != ".tmp":
                    found.append((path, status.st_size, status.st_mtime))
                elif time.time() - status.st_mtime > 3600:
                    path.unlink()
        return found

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256
