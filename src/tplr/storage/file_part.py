"""A part of a file as a file of its own, hashed while it is read."""

import hashlib
import io
import os
from pathlib import Path

from tplr.storage.parts import Part


class FilePart(io.RawIOBase):
    """What an upload sends: each byte is read once, and none is kept. ``seek`` knows the start and the end."""

    def __init__(self, path: Path, part: Part) -> None:
        """Raises OSError. Blocks, as ``read`` does."""
        self._file = path.open("rb")
        self._part = part
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._part.stop - self._part.start
        if offset != 0 or whence not in (os.SEEK_SET, os.SEEK_END):
            raise io.UnsupportedOperation("only to the start or the end")
        self._left = size if whence == os.SEEK_SET else 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._file.seek(self._part.stop - self._left)
        return size - self._left

    def tell(self) -> int:
        return self._part.stop - self._part.start - self._left

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._md5.update(data)
        self._left -= len(data)
        return data

    def md5(self) -> str:
        """Of what was read since the start, 32 hex digits."""
        return self._md5.hexdigest()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()
