"""An unfinished download on disk: a temporary file beside its target, and a record of the parts that are whole in it.

Both stay when a download is broken off, so that the next one to the same path fetches only what is missing.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from tplr.errors import StateError
from tplr.schemas import ObjectInfo
from tplr.storage.digest import Digest
from tplr.storage.parts import Part, cut, part_bytes

# Small enough to stay in a core's cache between reading and hashing.
_BLOCK_BYTES = 2**18
_BLOCKS_AT_ONCE = 16


class PartialDownload:
    """The parts of one version of an object, as far as they have come. The methods block: call them in a thread.

    Attributes:
        missing: parts that are still to be fetched.
    """

    def __init__(self, path: Path, info: ObjectInfo, digest: Digest) -> None:
        """Take up what an earlier download of the same version left; begin anew if there is nothing of the kind.

        Args:
            digest: is given every part once, in order, by the time that ``damage`` is asked for.
        """
        self._size = info.size
        self._parts = cut(info.size)
        self._path = path
        self._record, self._file = _paths(path)
        self._digest = digest
        self._digested = 0  # bytes
        self._digesting = threading.Lock()
        self._block = memoryview(bytearray(_BLOCK_BYTES))
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"key": info.key, "size": info.size, "etag": info.etag}
        recorded = self._read_record(header)
        if recorded is None:
            self.discard()
            self._record.write_text(json.dumps(header) + "\n")
            self._allocate()
        self._opened = self._file.open("r+b", buffering=0)
        self.missing = [part for part in self._parts if part.number not in (recorded or ())]
        # Where the next byte of each part goes. What is below is never written again: it may have been hashed.
        self.reached = {part.number: part.stop for part in self._parts} | {
            part.number: part.start for part in self.missing
        }

    def write(self, part: Part, piece: memoryview) -> None:
        """Put the next bytes of a part in their place. Threads may write different parts at once.

        Raises:
            StateError: the disk is full or not writable.
        """
        position = self.reached[part.number]
        try:
            written = 0
            while written < len(piece):
                written += os.pwrite(self._opened.fileno(), piece[written:], position + written)
            with self._unless_busy() as may_hash:
                if may_hash and position == self._digested:  # in turn, and still in this core's cache
                    self._digest.update(piece)
                    self._digested += len(piece)
                self.reached[part.number] += len(piece)
                if may_hash:
                    # While the network goes on, but not so long that this part waits.
                    self._hash_on(_BLOCKS_AT_ONCE)
        except OSError as error:
            raise StateError(f"can't write {self._file}: {error.strerror or error}") from error

    def record(self, part: Part) -> None:
        """Keep in mind that a part is whole, also for a later process.

        Neither is synced if the digest will tell what a power cut took.
        """
        with self._unless_busy() as may_hash:
            if may_hash:
                self._hash_on()
        if not self._digest.tells:
            os.fdatasync(self._opened.fileno())
        with self._record.open("a") as record:
            record.write(f"{part.number}\n")

    def damage(self) -> str | None:
        """What is wrong with the bytes, now that all are there."""
        with self._digesting:
            self._hash_on()
        return self._digest.damage()

    def close(self) -> None:
        """To be called in the end, however that comes."""
        self._opened.close()

    def finish(self) -> None:
        """Make it the target, which a power cut may still tear: whoever reads it in a later run has to check it."""
        self._file.replace(self._path)
        self._record.unlink()

    def discard(self) -> None:
        """Leave nothing of it."""
        self.remove(self._path)

    @staticmethod
    def remove(path: Path) -> None:
        """Leave nothing of an unfinished download to ``path``."""
        for unfinished in _paths(path):
            unfinished.unlink(missing_ok=True)

    def _allocate(self) -> None:
        """A new file that has its place on the disk: half the work of writing it, and a full disk says so at once."""
        with self._file.open("wb") as file:
            if self._size:
                os.posix_fallocate(file.fileno(), 0, self._size)

    @contextlib.contextmanager
    def _unless_busy(self) -> Iterator[bool]:
        """Whether this thread may hash meanwhile: one at a time, and no other waits for it."""
        mine = self._digesting.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self._digesting.release()

    def _hash_on(self, blocks: float = math.inf) -> None:
        """Hash what is there and next in turn, in blocks that end where parts do."""
        while blocks > 0 and (length := min(self._next_in_turn(), _BLOCK_BYTES)) > 0:
            read = os.preadv(self._opened.fileno(), [self._block[:length]], self._digested)
            if not read:  # cut short by somebody else: the digest will tell
                break
            self._digest.update(self._block[:read])
            self._digested += read
            blocks -= 1

    def _next_in_turn(self) -> int:
        """How many bytes of the part that is to be hashed next are there."""
        number = self._digested // part_bytes(self._size) + 1
        return self.reached.get(number, 0) - self._digested

    def _read_record(self, header: dict[str, object]) -> set[int] | None:
        """Numbers of the parts that are whole; None if there is no record, or one of something else."""
        try:
            first, *lines = self._record.read_text().split("\n")
            if json.loads(first) != header or self._file.stat().st_size != header["size"]:
                return None
        except (FileNotFoundError, ValueError):
            return None
        # Behind the last newline stands what a killed process did not finish writing.
        numbers = {int(line) for line in lines[:-1] if line.isdecimal()}
        return numbers & {part.number for part in self._parts}


def _paths(path: Path) -> tuple[Path, Path]:
    """Record and temporary file of a download to ``path``; the record goes first, as it vouches for the file."""
    return path.with_name(path.name + ".part.record"), path.with_name(path.name + ".part")
