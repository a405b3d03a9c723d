"""Reads the elements of a JSON list one at a time, so that a long file takes no more memory than a short one."""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

from tplr.errors import DataError
from tplr.records.jsonl import MAX_RECORD_BYTES, check_encoding

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
# Characters before the end of a cut text at which an error may be due to the cut: those of ``-Infinity`` and a
# surrogate pair's escapes.
_CUT = 16
_NUMBER_CUT = 2  # at the end of a cut number, such as ``1e+``, at most this many characters are not parsed as a part


class JsonList:
    """Iterates over the elements of a JSON list; another value is an only element. If ``read`` raises, the next
    iteration continues there.

    Args:
        read: returns the next bytes of the file; none at the end.
        name: of the file, for errors.

    Attributes:
        read_bytes: number of bytes read so far.

    Raises, while iterating:
        DataError: the file is not JSON in UTF-8, or an element has more than ``MAX_RECORD_BYTES`` characters.
    """

    def __init__(self, read: Callable[[], bytes], name: str) -> None:
        self.read_bytes = 0
        self._read, self._name = read, name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at = "", 0  # the text from the current element on, or a little before, and where that begins
        self._ended = False
        self._place = "start"
        self._number = 1  # of the next element

    def __iter__(self) -> "JsonList":
        return self

    def __next__(self) -> Any:
        while True:
            char = self._next_character()
            if self._place == "end":
                if char:
                    raise self._error("expected the end of the file")
                raise StopIteration
            if self._place == "behind an element" and char not in (",", "]"):
                raise self._error("expected ',' or ']'")
            if self._place == "start" and char == "[":
                self._at, self._place = self._at + 1, "begin"
            elif self._place in ("begin", "behind an element") and char == "]":
                self._at, self._place = self._at + 1, "end"
            elif self._place == "behind an element":
                self._at, self._place = self._at + 1, "before an element"
            else:
                value = self._value()
                self._place = "end" if self._place == "start" else "behind an element"
                self._number += 1
                return value

    def _next_character(self) -> str:
        """Skip white space; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if self._ended or end < len(self._text) - _NUMBER_CUT:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _CUT or error.msg.startswith("Unterminated string")
                if self._ended or not cut:
                    raise self._error(str(error)) from error
            except (ValueError, RecursionError) as error:
                raise self._error(str(error)) from error
            if (length := len(self._text) - self._at) > MAX_RECORD_BYTES:
                raise DataError(
                    f"{self._name}: element {self._number} has more than {MAX_RECORD_BYTES} characters: cut it"
                )
            while len(self._text) - self._at < 2 * length and self._more():  # so it is parsed only a few times
                pass

    def _more(self) -> bool:
        """Add the next piece to the text; False at the end."""
        if self._ended:
            return False
        data = self._read()
        if not self.read_bytes:
            check_encoding(data, self._name)
        try:
            text = self._decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self._error(str(error)) from error
        self.read_bytes += len(data)
        self._ended = not data
        self._text, self._at = self._text[self._at :] + text, 0
        return not self._ended

    def _error(self, why: str) -> DataError:
        return DataError(f"{self._name} is not JSON: element {self._number}: {why}")
