"""Reads JSON Lines: splits a byte stream into lines with positions, and parses a line as a JSON value."""

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tplr.errors import DataError

READ_BYTES = 2**18
MAX_RECORD_BYTES = 64 * 2**20  # one record of a file; a whole book has a tenth of it


class LineReader:
    """Iterates over lines, which end at line feeds only. If ``read`` raises, or a loop ends early, the next iteration
    continues there.

    Args:
        read: returns the next bytes; none at the end.
        offset, number: bytes and lines before the first line.
        max_bytes: the rest of a longer line is dropped; the part that is returned is longer than ``max_bytes``.

    Attributes:
        offset: end of the last returned line, in bytes.
        number: its number, counted from 1.
        dropped: bytes that the first line of the last ``read_lines`` lacks.
    """

    def __init__(
        self, read: Callable[[], bytes], offset: int = 0, number: int = 0, max_bytes: int = sys.maxsize
    ) -> None:
        self.offset = offset
        self.number = number
        self.dropped = 0
        self._read = read
        self._max_bytes = max_bytes
        self._lines: Iterator[bytes] = iter(())  # whole ones
        self._parts: list[bytes] = []  # of the line whose end was not read yet
        self._held = 0  # bytes in ``_parts``
        self._dropped = 0  # bytes of that line that are not in ``_parts``

    def __iter__(self) -> Iterator[bytes]:
        # A generator, which costs a loop half of what calls of ``__next__`` would.
        while True:
            for line in self._lines:
                self.offset += len(line)
                self.number += 1
                yield line
            if not self._refill():
                return

    def __next__(self) -> bytes:
        while True:
            for line in self._lines:
                self.offset += len(line)
                self.number += 1
                return line
            if not self._refill():
                raise StopIteration

    def read_lines(self) -> list[bytes]:
        """Return the whole lines of the next reads; [] at the end. For callers that count bytes and lines."""
        while data := self._read():
            lines = data.splitlines(keepends=True) if b"\r" not in data else _split_lines(data)
            if lines[0].endswith(b"\n"):
                begun = [] if lines[-1].endswith(b"\n") else [lines.pop()]
                self._hold(lines[0])
                lines[0] = self._take()
                self._parts, self._held = begun, sum(map(len, begun))
                return lines
            self._hold(lines[0])
        rest = self._take()
        return [rest] if rest else []

    def _hold(self, part: bytes) -> None:
        """Hold the next part of a line, unless those before it are too long already."""
        if self._held <= self._max_bytes:
            self._parts.append(part)
            self._held += len(part)
        else:
            self._dropped += len(part)

    def _take(self) -> bytes:
        line, self.dropped = b"".join(self._parts), self._dropped
        self._parts, self._held, self._dropped = [], 0, 0
        return line

    def _refill(self) -> bool:
        lines = self.read_lines()
        self._lines = iter(lines)
        self.offset += self.dropped  # the first line, with which the caller goes on, ends there
        return bool(lines)


def is_blank(line: bytes) -> bool:
    """Return whether a line has only white space, possibly after a byte-order mark."""
    return line.removeprefix(codecs.BOM_UTF8).isspace()


def check_encoding(line: bytes, name: str) -> None:
    """Check the first line of the file ``name``: a file in another encoding has no line that can be read.

    Raises:
        DataError: it is UTF-16 or UTF-32.
    """
    encoding = json.detect_encoding(line)
    if not encoding.startswith("utf-8"):
        raise DataError(f"{name} line 1: expected UTF-8, got {encoding}: convert the file to UTF-8")


def parse_json(text: bytes) -> Any:
    """Parse a JSON value in UTF-8, with or without a byte-order mark.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or (UnicodeDecodeError) is no UTF-8.
    """
    try:
        try:
            # For bytes ``loads`` would detect the encoding, which takes as long as parsing a short line.
            return json.loads(text.decode())
        except ValueError as error:
            if text.startswith(codecs.BOM_UTF8):
                return json.loads(text.decode("utf-8-sig"))
            encoding = json.detect_encoding(text)
            if encoding.startswith("utf-8"):
                raise
            raise UnicodeDecodeError("utf-8", text, 0, 1, f"expected UTF-8, got {encoding}") from error
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error


def _split_lines(data: bytes) -> list[bytes]:
    """Split like ``splitlines(keepends=True)``, but not at carriage returns."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
