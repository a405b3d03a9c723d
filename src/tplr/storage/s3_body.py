"""Request bodies: the sending thread reads them in pieces, and from the start each time they are sent."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from tplr.errors import StoreError
from tplr.storage.parts import FilePart

PIECE_BYTES = 2**18


class Body(Protocol):
    """A request's body.

    Attributes:
        sent: bytes that the current or last iteration has yielded.
    """

    sent: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        ...

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the bytes in pieces. The next piece may reuse the memory of this one."""
        ...

    def md5(self) -> str:
        """Return the MD5 of the last iteration's bytes, 32 hex digits."""
        ...


class BytesBody:
    """A ``Body`` in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self.sent = 0
        self._data = memoryview(data)
        self._md5 = ""

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, self.size, PIECE_BYTES):
            piece = self._data[start : start + PIECE_BYTES]
            yield piece
            self.sent = start + len(piece)

    def md5(self) -> str:
        self._md5 = self._md5 or hashlib.md5(self._data, usedforsecurity=False).hexdigest()
        return self._md5


class FileBody:
    """A file or a part of it: a ``Body`` that is hashed while it is read, with one piece in memory at a time.

    Its methods block.
    """

    def __init__(self, path: Path, part: FilePart | None = None, *, hashed: bool = True) -> None:
        """Open the file. Without ``hashed``, ``md5`` is not available. Raises OSError."""
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._part = part or FilePart(1, 0, os.fstat(self._file.fileno()).st_size)
        self.sent = 0
        self._hashed = hashed
        self._md5 = hashlib.md5(usedforsecurity=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        return self._part.stop - self._part.start

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the bytes in pieces. Raises StoreError if the file has become shorter."""
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._file.seek(self._part.start)
        block = memoryview(bytearray(min(PIECE_BYTES, self.size)))
        self.sent = 0
        while self.sent < self.size:
            count = self._file.readinto(block[: self.size - self.sent])
            if not count:
                raise StoreError(f"{self._path} was truncated during the upload")
            if self._hashed:
                self._md5.update(block[:count])
            yield block[:count]
            self.sent += count

    def md5(self) -> str:
        return self._md5.hexdigest()


def hash_file(algorithm: str, path: Path, part: FilePart | None = None) -> str:
    """Return the hex digest of a file or a part of it. Blocks. Raises OSError."""
    found = hashlib.new(algorithm, usedforsecurity=False)
    with FileBody(path, part, hashed=False) as body:
        for piece in body:
            found.update(piece)
    return found.hexdigest()
