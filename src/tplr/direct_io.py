"""Direct I/O for large files: on a busy machine the page cache costs more time than hashing the data."""

import contextlib
import errno
import fcntl
import mmap
import os
from typing import BinaryIO

BLOCK_BYTES = 2**22
# Not all systems have O_DIRECT; without it the writer only buffers.
O_DIRECT = getattr(os, "O_DIRECT", 0)


class UncachedWriter:
    """Writes a new file in blocks, without the page cache if system and disk support it. Call ``finish`` at the end."""

    def __init__(self, file: BinaryIO) -> None:
        """``file`` must be empty, and nothing else may write to it before ``finish``."""
        self._descriptor = file.fileno()
        self._block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as direct writes require
        self._filled = 0
        self._set_direct(True)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError."""
        rest = memoryview(data)
        while rest:
            part = rest[: BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._put()

    def finish(self) -> None:
        """Write the remaining bytes, less than a block, through the page cache. Raises OSError."""
        self._set_direct(False)
        self._put()
        self._block.close()

    def _put(self) -> None:
        with memoryview(self._block) as block, block[: self._filled] as filled:
            done = 0
            while done < len(filled):
                try:
                    done += os.write(self._descriptor, filled[done:])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    self._set_direct(False)  # the disk rejects direct writes
        self._filled = 0

    def _set_direct(self, wanted: bool) -> None:
        self._direct = wanted
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~O_DIRECT
        with contextlib.suppress(OSError):  # some file systems have no direct I/O
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (O_DIRECT if wanted else 0))
