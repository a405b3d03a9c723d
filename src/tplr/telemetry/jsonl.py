"""Events as JSON lines in a file: a node writes them; the live view and analyses read them."""

import contextlib
import errno
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple, Self

from tplr.errors import ConfigError
from tplr.logging import logger
from tplr.telemetry.events import Event


class JsonlListener:
    """Appends one line per event with one write call, so a reader never sees mixed lines.

    A file that would exceed ``max_bytes`` is first renamed to ``{path}.1``, which replaces the previous one.
    """

    def __init__(self, path: Path, *, max_bytes: float = math.inf) -> None:
        """Open ``path`` for appending. Raises ConfigError if it can't be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"--events {path}: {error.strerror}; give a file in a writable folder") from error
        self._path = path
        self._max_bytes = max_bytes
        self._healthy = True
        # An incomplete last line, of a killed process or of a full disk, must not merge with the next one.
        end = self._file.tell()
        self._incomplete = bool(end) and os.pread(self._file.fileno(), 1, end - 1) != b"\n"

    def __call__(self, event: Event) -> None:
        self._write(json.dumps(event, separators=(",", ":")).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        try:
            if 0 < self._file.tell() > self._max_bytes - len(line):
                self._rotate()
            line = b"\n" + line if self._incomplete else line
            written = self._file.write(line)
            self._incomplete = written < len(line)
            if self._incomplete:
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")
            self._healthy = True
        except OSError as error:
            # A full disk must not end the node that reports it.
            if self._healthy:
                logger.warning("events are lost: can't write %s: %s", self._file.name, error.strerror)
            self._healthy = False

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody has moved or deleted it
            self._path.replace(rotated(self._path))
        new = self._path.open("ab+", buffering=0)
        self._file.close()
        self._file, self._incomplete = new, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def rotated(path: Path) -> Path:
    """Return the path of the events before those in ``path``."""
    return path.with_name(f"{path.name}.1")


MAX_LINE = 2**16  # bytes of the first line that are compared


class Position(NamedTuple):
    """The position up to which an event file has been read.

    Attributes:
        offset: in bytes.
        file: identity of the file by device, inode and first line, because inodes are reused; None: nothing was read.
    """

    offset: int = 0
    file: tuple[int, int, bytes] | None = None

    def within(self, file: tuple[int, int, bytes]) -> bool:
        """Return whether this is a position in ``file``. Before its first line is complete, the file is unknown."""
        return self.file is not None and self.file[:2] == file[:2] and (self.offset == 0 or self.file == file)


START = Position()


def read_events(path: Path, position: Position = START) -> tuple[list[dict[str, Any]], Position]:
    """Read the complete lines from ``position`` on; return them and the position after them.

    A missing file has no events. If the file has been rotated since, the unread lines of the previous file come first.
    """
    try:
        events, end = _read_from(path, position)
    except FileNotFoundError:
        return [], position
    if position.file is None or end.file is None or position.within(end.file):
        return events, end
    try:
        before, _ = _read_from(rotated(path), position)
    except FileNotFoundError:
        before = []
    return before + events, end


def find_event(path: Path, event: dict[str, Any]) -> str:
    """Return ``PATH line N`` of an event in a file or in its rotated one, or ``PATH`` if it is no longer there."""
    for one in (path, rotated(path)):
        with contextlib.suppress(FileNotFoundError), one.open("rb") as file:
            for number, line in enumerate(file, 1):
                if _parse(line) == event:
                    return f"{one} line {number}"
    return str(path)


def _read_from(path: Path, position: Position) -> tuple[list[dict[str, Any]], Position]:
    """Read from ``position``, or from the beginning if it is another file."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        identity = stat.st_dev, stat.st_ino, file.readline(MAX_LINE)
        start = position.offset if position.within(identity) else 0
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    events = [event for line in whole.splitlines() if (event := _parse(line)) is not None]
    return events, Position(start + len(whole), identity)


def _parse(line: bytes) -> dict[str, Any] | None:
    # An incomplete line of a killed process is not JSON.
    try:
        return json.loads(line)
    except ValueError:
        return None
