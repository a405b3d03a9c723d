"""An unfinished download on disk: a temporary file beside its target, and a record of the parts that are whole in it.

Both stay when a download is broken off, so that the next one to the same path fetches only what is missing.
"""

import json
import os
import threading
from pathlib import Path

from tplr.files import sync_folder
from tplr.schemas import ObjectInfo
from tplr.storage.digest import Digest
from tplr.storage.parts import Part, cut


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
        self._parts = cut(info.size)
        self._whole: set[int] = set()
        self._path = path
        self._record, self._file = _paths(path)
        self._digest = digest
        self._digested = 0
        self._digesting = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"key": info.key, "size": info.size, "etag": info.etag}
        if (recorded := self._read_record(header)) is None:
            self.discard()
            self._record.write_text(json.dumps(header) + "\n")
            with self._file.open("wb") as file:
                file.truncate(info.size)
        else:
            self._whole = recorded
        self.missing = [part for part in self._parts if part.number not in self._whole]

    def add(self, part: Part, data: bytes) -> None:
        """Keep the bytes of a part. Threads may add different parts at once."""
        with self._file.open("r+b") as file:
            file.seek(part.start)
            file.write(data)
        with self._record.open("a") as record:
            record.write(f"{part.number}\n")
        self._whole.add(part.number)
        # One thread hashes while the network goes on; what it leaves is done by the next, or in the end.
        if self._digesting.acquire(blocking=False):
            try:
                self._hash_on(part, data)
            finally:
                self._digesting.release()

    def damage(self) -> str | None:
        """What is wrong with the bytes, now that all are there."""
        with self._digesting:
            self._hash_on()
        return self._digest.damage()

    def finish(self) -> None:
        """Make it the target, durably."""
        with self._file.open("r+b") as file:
            os.fsync(file.fileno())
        self._file.replace(self._path)
        self._record.unlink()
        sync_folder(self._path.parent)

    def discard(self) -> None:
        """Leave nothing of it."""
        self.remove(self._path)

    @staticmethod
    def remove(path: Path) -> None:
        """Leave nothing of an unfinished download to ``path``."""
        for unfinished in _paths(path):
            unfinished.unlink(missing_ok=True)

    def _hash_on(self, latest: Part | None = None, data: bytes = b"") -> None:
        """Hash the parts that are whole and next in turn; ``latest`` is still in memory."""
        while self._digested < len(self._parts) and (part := self._parts[self._digested]).number in self._whole:
            self._digest.update(data if part is latest else self._read(part))
            self._digested += 1

    def _read(self, part: Part) -> bytes:
        with self._file.open("rb") as file:
            file.seek(part.start)
            return file.read(part.stop - part.start)

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
