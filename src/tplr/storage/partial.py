"""An unfinished download on disk: a temporary file beside its target, some of whose parts may be complete.

It stays when a download is interrupted. The digests of its parts tell which are complete, so no other state is kept.
"""

import os
from pathlib import Path

from blake3 import blake3

from tplr.errors import StateError
from tplr.storage.parts import FilePart

# Small enough to stay in a core's cache between reading and hashing.
_BLOCK_BYTES = 2**18


class PartialDownload:
    """The file. Its methods block; threads may handle different parts at once.

    Attributes:
        resumed: an earlier download left the file.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open the file of an earlier download to ``path`` if it has ``size`` bytes, else a new one."""
        self._path = path
        self._file = unfinished_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.resumed = self._file.exists() and self._file.stat().st_size == size
        if not self.resumed:
            self._allocate(size)
        self._opened = self._file.open("r+b", buffering=0)

    def holds(self, part: FilePart, digest: str) -> bool:
        """Whether the bytes of a part have this BLAKE3 digest."""
        found = blake3()
        block = memoryview(bytearray(_BLOCK_BYTES))
        at = part.start
        while read := os.preadv(self._opened.fileno(), [block[: part.stop - at]], at):
            found.update(block[:read])
            at += read
        return found.hexdigest() == digest

    def write(self, piece: memoryview, at: int) -> None:
        """Write bytes at ``at``. Raises StateError: the disk is full or not writable."""
        try:
            written = 0
            while written < len(piece):
                written += os.pwrite(self._opened.fileno(), piece[written:], at + written)
        except OSError as error:
            raise StateError(f"can't write {self._file}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; call it in any case."""
        self._opened.close()

    def finish(self) -> None:
        """Rename the file to the target. It is not synced, so a later run has to verify it."""
        self._file.replace(self._path)

    def discard(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def _allocate(self, size: int) -> None:
        """Create the file with its blocks allocated: writing is faster then, and a full disk is found at once."""
        with self._file.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)


class ArrivingPart:
    """A part that is being downloaded: the thread that receives a piece writes and hashes it.

    Attributes:
        reached: offset of its next byte in the file.
    """

    def __init__(self, part: FilePart, partial: PartialDownload) -> None:
        self.part = part
        self.reached = part.start
        self._partial = partial
        self._hash = blake3()

    def write(self, piece: memoryview) -> None:
        """Write the next bytes. Raises StateError as ``PartialDownload.write``; ``reached`` is unchanged then."""
        self._partial.write(piece, self.reached)
        self._hash.update(piece)
        self.reached += len(piece)

    def blake3(self) -> str:
        """Of the bytes so far, 64 hex digits."""
        return self._hash.hexdigest()


def unfinished_file(path: Path) -> Path:
    """The file of an unfinished download to ``path``."""
    return path.with_name(path.name + ".part")
