"""An unfinished download on disk: a temporary file beside its target, and a record of the parts that are whole in it.

Both stay when a download is broken off, so that the next one to the same path fetches only what is missing.
"""

import hashlib
import json
import os
from pathlib import Path

from tplr.files import sync_folder
from tplr.schemas import ObjectInfo
from tplr.storage.parts import Part, cut, md5_hex


class PartialDownload:
    """The parts of one version of an object, as far as they have come. The methods block: call them in a thread.

    Attributes:
        parts: all of them, whole or missing.
        md5s: number -> MD5 of those that are whole.
    """

    def __init__(self, path: Path, info: ObjectInfo) -> None:
        """Take up what an earlier download of the same version left; begin anew if there is nothing of the kind."""
        self.parts = cut(info.size)
        self.md5s: dict[int, str] = {}
        self._path = path
        self._record, self._file = _paths(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"key": info.key, "size": info.size, "etag": info.etag}
        recorded = self._read_record(header)
        if recorded is None:
            self.discard()
            self._record.write_text(json.dumps(header) + "\n")
            with self._file.open("wb") as file:
                file.truncate(info.size)
        else:
            # After a loss of power the record may tell of bytes that never reached the disk.
            whole = [part for part in self.parts if self._digest(part) == recorded.get(part.number)]
            self.md5s = {part.number: recorded[part.number] for part in whole}

    def missing(self) -> list[Part]:
        """Parts that are still to be fetched."""
        return [part for part in self.parts if part.number not in self.md5s]

    def add(self, part: Part, data: bytes) -> None:
        """Keep the bytes of a part. Threads may add different parts at once."""
        with self._file.open("r+b") as file:
            file.seek(part.start)
            file.write(data)
        md5 = md5_hex(data)
        with self._record.open("a") as record:
            record.write(json.dumps({"part": part.number, "md5": md5}) + "\n")
        self.md5s[part.number] = md5

    def digest(self, algorithm: str) -> str:
        """Hex digest of the whole file."""
        with self._file.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()

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

    def _read_record(self, header: dict[str, object]) -> dict[int, str] | None:
        """Number -> MD5 of the recorded parts; None if the record is missing, torn at its head or another object's."""
        recorded: dict[int, str] = {}
        try:
            first, *lines = self._record.read_text().splitlines()
            if json.loads(first) != header or self._file.stat().st_size != header["size"]:
                return None
            for line in lines:
                entry = json.loads(line)
                recorded[entry["part"]] = entry["md5"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            # The process died while it wrote a line: what stands before holds.
            return recorded or None
        return recorded

    def _digest(self, part: Part) -> str:
        with self._file.open("rb") as file:
            file.seek(part.start)
            return md5_hex(file.read(part.stop - part.start))


def _paths(path: Path) -> tuple[Path, Path]:
    """Record and temporary file of a download to ``path``; the record goes first, as it vouches for the file."""
    return path.with_name(path.name + ".part.jsonl"), path.with_name(path.name + ".part")
