"""An unfinished download on disk: a temporary file beside its target, some of whose parts may be complete.

The file remains when a download is interrupted. Digests show which parts are complete, so no other state is kept.
"""

import os
from pathlib import Path

from blake3 import blake3

from tplr.errors import StateError
from tplr.storage.parts import FilePart

# Small enough to stay in a core's cache between reading and hashing.
_BLOCK_BYTES = 2**18


class PartialDownload:
    """The temporary file of a download. Its methods block; threads may handle different parts concurrently.

    Attributes:
        resumed: whether the file is from an earlier download.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open the file of an earlier download to ``path`` if it has ``size`` bytes; otherwise create a new file."""
        self._path = path
        self._file = unfinished_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.resumed = self._file.exists() and self._file.stat().st_size == size
        if not self.resumed:
            self._allocate(size)
        self._opened = self._file.open("r+b", buffering=0)

    def holds(self, part: FilePart, digest: str) -> bool:
        """Return whether the bytes of a part have this BLAKE3 digest."""
        found = blake3()
        block = memoryview(bytearray(_BLOCK_BYTES))
        at = part.start
        while read := os.preadv(self._opened.fileno(), [block[: part.stop - at]], at):
            found.update(block[:read])
            at += read
        return found.hexdigest() == digest

    def write(self, piece: memoryview, at: int) -> None:
        """Write bytes at offset ``at``. Raises StateError if the disk is full or not writable."""
        try:
            written = 0
            while written < len(piece):
                written += os.pwrite(self._opened.fileno(), piece[written:], at + written)
        except OSError as error:
            raise StateError(f"can't write {self._file}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; must always be called."""
        self._opened.close()

    def finish(self) -> None:
        """Rename the file to the target. The file is not synced, so a later run must verify it."""
        self._file.replace(self._path)

    def discard(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def _allocate(self, size: int) -> None:
        """Create the file with allocated blocks, so that writing is faster and a full disk is detected at once."""
        with self._file.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)


class ArrivingPart:
    """A part in download: the thread that receives a piece also writes and hashes it.

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
        """Return the BLAKE3 digest of the bytes so far, 64 hex digits."""
        return self._hash.hexdigest()


def unfinished_file(path: Path) -> Path:
    """Return the path of the file of an unfinished download to ``path``."""
    return path.with_name(path.name + ".part")
