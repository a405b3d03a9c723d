"""An unfinished download on disk: a temporary file beside its target, some of whose parts may be whole.

It stays when a download is broken off. Which of its parts are there their digests tell, so that nothing else has to be
kept, and nothing that is found has to be believed.
"""

import os
from pathlib import Path

from blake3 import blake3

from tplr.errors import StateError
from tplr.storage.parts import FilePart

# Small enough to stay in a core's cache between reading and hashing.
_BLOCK_BYTES = 2**18


class PartialDownload:
    """The file. Its methods block: call them in a thread; threads may handle different parts at once.

    Attributes:
        resumed: an earlier download left it.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Take up what an earlier download to ``path`` left; begin anew if there is nothing of ``size`` bytes."""
        self._path = path
        self._file = _unfinished(path)
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
        """Put bytes in their place. Raises StateError: the disk is full or not writable."""
        try:
            written = 0
            while written < len(piece):
                written += os.pwrite(self._opened.fileno(), piece[written:], at + written)
        except OSError as error:
            raise StateError(f"can't write {self._file}: {error.strerror or error}") from error

    def close(self) -> None:
        """To be called in the end, however that comes."""
        self._opened.close()

    def finish(self) -> None:
        """Make it the target, which a power cut may still tear: whoever reads it in a later run has to check it."""
        self._file.replace(self._path)

    def discard(self) -> None:
        """Leave nothing of it."""
        self.remove(self._path)

    @staticmethod
    def remove(path: Path) -> None:
        """Leave nothing of an unfinished download to ``path``."""
        _unfinished(path).unlink(missing_ok=True)

    def _allocate(self, size: int) -> None:
        """A new file that has its place on the disk: half the work of writing it, and a full disk says so at once."""
        with self._file.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)


class ArrivingPart:
    """A part of a download while it comes: each piece is hashed and written by the thread that received it.

    Attributes:
        reached: where its next byte goes, in bytes from the start of the file.
    """

    def __init__(self, part: FilePart, partial: PartialDownload) -> None:
        self.part = part
        self.reached = part.start
        self._partial = partial
        self._hash = blake3()

    def write(self, piece: memoryview) -> None:
        """Take the next bytes. Raises StateError as ``PartialDownload.write``, and has taken none then."""
        self._partial.write(piece, self.reached)
        self._hash.update(piece)
        self.reached += len(piece)

    def blake3(self) -> str:
        """Of what has come, 64 hex digits."""
        return self._hash.hexdigest()


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".part")
