"""Large files straight to the disk: on a busy machine the page cache costs more time than a checksum of it all."""

import contextlib
import errno
import fcntl
import mmap
import os
from typing import BinaryIO

BLOCK_BYTES = 2**22
# Not every system has it; without it the writer only collects.
O_DIRECT = getattr(os, "O_DIRECT", 0)


class UncachedWriter:
    """Writes a new file block by block, past the page cache where system and disk allow it. ``finish`` ends it."""

    def __init__(self, file: BinaryIO) -> None:
        """``file`` is empty, and nobody else writes to it until ``finish``."""
        self._descriptor = file.fileno()
        self._block = mmap.mmap(-1, BLOCK_BYTES)  # as direct writes want it: whole pages
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
        """Write what is left; it is less than a block, so it goes the ordinary way. Raises OSError."""
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
                    self._set_direct(False)  # the disk does not take it after all
        self._filled = 0

    def _set_direct(self, wanted: bool) -> None:
        self._direct = wanted
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~O_DIRECT
        with contextlib.suppress(OSError):  # some file systems know nothing but the cache
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (O_DIRECT if wanted else 0))
