"""JSON Lines: a byte stream as lines with their positions, and a line as a JSON value."""

import codecs
import json
import sys
from collections.abc import Callable
from typing import Any, Self

READ_BYTES = 2**18


class LineReader:
    """Iterates over lines, which end at line feeds only. If ``read`` raises, the next call continues the same line.

    Args:
        read: returns the next bytes; none at the end.
        offset, number: bytes and lines before the first line.
        max_bytes: the rest of a longer line is dropped; what is given of it is longer than ``max_bytes``.

    Attributes:
        offset: where the last line given ends, in bytes.
        number: its number, counted from 1.
    """

    def __init__(
        self, read: Callable[[], bytes], offset: int = 0, number: int = 0, max_bytes: int = sys.maxsize
    ) -> None:
        self.offset = offset
        self.number = number
        self._read = read
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []  # whole ones, last first
        self._parts: list[bytes] = []  # of the line whose end was not read yet
        self._held = 0  # bytes in ``_parts``

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        line = self._lines.pop() if self._lines else self._next_line()
        self.offset += len(line)
        self.number += 1
        return line

    def _next_line(self) -> bytes:
        while data := self._read():
            lines = data.splitlines(keepends=True) if b"\r" not in data else _split_lines(data)
            if lines[0].endswith(b"\n"):
                first = self._joined(lines[0])
                self._parts = [] if lines[-1].endswith(b"\n") else [lines.pop()]
                self._held = sum(map(len, self._parts))
                self._lines = lines[:0:-1]
                return first
            if self._held <= self._max_bytes:
                self._parts.append(lines[0])
                self._held += len(lines[0])
            else:
                self.offset += len(lines[0])
        if not self._parts:
            raise StopIteration
        line, self._parts, self._held = self._joined(b""), [], 0
        return line

    def _joined(self, end: bytes) -> bytes:
        return b"".join([*self._parts, end]) if self._parts else end


def is_blank(line: bytes) -> bool:
    """Whether a line holds nothing but white space, perhaps behind a byte-order mark."""
    return line.removeprefix(codecs.BOM_UTF8).isspace()


def parse_json(text: bytes) -> Any:
    """A JSON value in UTF-8, with or without a byte-order mark.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or (UnicodeDecodeError) is no UTF-8.
    """
    try:
        return json.loads(text)  # which skips the mark
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error


def _split_lines(data: bytes) -> list[bytes]:
    """As ``splitlines(keepends=True)``, which would also end lines at carriage returns."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
