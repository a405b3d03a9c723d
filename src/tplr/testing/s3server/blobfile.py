"""A file that holds bytes and the record that describes them: ``bytes | JSON record | length of record | magic``.

Both are in one file, so that one rename publishes both, and no crash leaves one without the other. The record follows
the bytes because it holds their ETag, which is known last.
"""

import asyncio
import contextlib
import json
import os
import secrets
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tplr.files import sync_folder

BLOCK = 2**20  # bytes in memory for each body that is received or sent
MAGIC = b"tplrblob"
TAIL = struct.Struct(">I8s")


class Draft:
    """A file that is being written under a hidden name. It is discarded unless it is published.

    The methods block: call them in a worker thread.
    """

    def __init__(self, folder: Path, *, fsync: bool) -> None:
        self.size = 0
        self._fsync = fsync
        self._path = folder / secrets.token_hex(16)
        self._file = self._path.open("xb")

    def write(self, block: bytes) -> None:
        self._file.write(block)
        self.size += len(block)

    def append(self, file: BinaryIO, size: int) -> None:
        """Appends the first ``size`` bytes of a file of the same file system, without copying them through memory."""
        self._file.flush()
        done = 0
        while done < size:
            copied = os.copy_file_range(file.fileno(), self._file.fileno(), size - done, done)
            if not copied:
                raise OSError(f"{file.name} ends before its record says")
            done += copied
        self._file.seek(0, os.SEEK_END)
        self.size += size

    def sync(self) -> None:
        """Writes the bytes to disk: the slow half of publishing."""
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())

    def publish(self, path: Path, record: dict[str, Any]) -> None:
        """Appends the record and renames the file to ``path``; an existing file is replaced."""
        text = json.dumps(record).encode()
        self._file.write(text + TAIL.pack(len(text), MAGIC))
        self.sync()
        self._file.close()
        self._path.replace(path)
        if self._fsync:
            sync_folder(path.parent)

    def discard(self) -> None:
        """Deletes the draft; does nothing after it was published."""
        with contextlib.suppress(OSError):  # a full disk: the buffered rest is lost, the file is closed
            self._file.close()
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class FileSlice:
    """``length`` bytes of an open file from byte ``start`` on, read in blocks. Owns the file."""

    file: BinaryIO
    start: int
    length: int

    async def blocks(self) -> AsyncIterator[bytes]:
        position, end = self.start, self.start + self.length
        while position < end:
            block = await asyncio.to_thread(os.pread, self.file.fileno(), min(BLOCK, end - position), position)
            if not block:
                raise OSError(f"{self.file.name} ends before its record says")
            position += len(block)
            yield block


def read_record(file: BinaryIO) -> dict[str, Any]:
    """Read the record at the end of an open blob file.

    Raises:
        ValueError: this is not a blob file, or it is incomplete.
    """
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), TAIL.size, max(0, size - TAIL.size))
    if len(tail) < TAIL.size or tail[4:] != MAGIC:
        raise ValueError(f"{file.name} is not a blob file")
    length = TAIL.unpack(tail)[0]
    text = os.pread(file.fileno(), length, max(0, size - TAIL.size - length))
    record = json.loads(text)
    if not isinstance(record, dict) or record.get("size") != size - TAIL.size - length:
        raise ValueError(f"{file.name} is torn")
    return record
