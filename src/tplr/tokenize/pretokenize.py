"""Cuts texts into pieces as GPT-2's pattern does, all places at once.

The pattern, alternatives tried in this order from each piece's end on::

    's|'t|'re|'ve|'m|'ll|'d | ?\\p{L}+ | ?\\p{N}+ | ?[^\\s\\p{L}\\p{N}]+ | \\s+(?!\\S) | \\s+

So a piece begins where the class of characters changes, but for a space, which goes with what follows; a run of white
space gives up its last character if anything follows; and a contraction is a piece if its apostrophe begins one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

# Classes of characters. A separator, a byte that UTF-8 never has, stands after each text.
_OTHER, _LETTER, _NUMBER, _SPACE, _WHITE, _SEPARATOR, _UNKNOWN = range(7)
_SEPARATOR_BYTE = b"\xff"
_ASCII = bytes(range(128))
_APOSTROPHE, _D, _E, _L, _M, _R, _S, _T, _V = b"'delmrstv"

Flags = npt.NDArray[np.bool_]


class Pieces(NamedTuple):
    """Pieces of some texts, one text after another, each followed by its separator.

    Attributes:
        data: the texts in UTF-8 and their separators.
        starts, ends: int64, where each piece lies in ``data``.
        separators: int64, which pieces are separators.
    """

    data: bytes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    separators: npt.NDArray[np.int64]


class Cutter:
    """Knows which class the tokenizers library's regular expressions put a character in; learns that as it meets them.

    Threads may share one: what several find out at once is the same.
    """

    def __init__(self) -> None:
        self._classes = np.full(0x110000, _UNKNOWN, np.uint8)
        self._learn(np.arange(128, dtype=np.uint32))
        self._byte_classes = bytes([*self._classes[:128], *[_OTHER] * 127, _SEPARATOR])

    def cut(self, texts: Sequence[str]) -> Pieces:
        """All pieces of texts that ``cuts`` says yes to."""
        data = _SEPARATOR_BYTE.join([*map(str.encode, texts), b""])
        codes = np.frombuffer(data, np.uint8)
        classes = np.frombuffer(data.translate(self._byte_classes), np.uint8)
        if all(map(str.isascii, texts)):
            return _pieces(data, _beginnings(codes, classes), codes)
        # Each byte is of its character's class; so the next character is where the first piece of a run may begin.
        at = np.flatnonzero((codes >= 0x80) & (codes < 0xFF))
        of_characters, widths = self._beyond_ascii(data)
        classes = classes.copy()
        classes[at] = np.repeat(of_characters, widths)
        begins = _beginnings(codes, classes)
        # White space gives up its last byte; what it gives up is all of that character.
        firsts = np.repeat(at[np.cumsum(widths) - widths], widths)
        inside = begins[at] & (at > firsts)
        begins[at[inside]] = False
        begins[firsts[inside]] = True
        return _pieces(data, begins, codes)

    def cuts(self, text: str) -> bool:
        """Whether ``text`` can be cut: all can but those that hold half of a surrogate pair."""
        if text.isascii():
            return True
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        return True

    def _beyond_ascii(self, data: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Classes of the characters beyond ASCII, in order, and how many bytes each takes."""
        characters = data.translate(None, _ASCII + _SEPARATOR_BYTE).decode()
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        classes = self._classes[codes]
        if (classes == _UNKNOWN).any():
            self._learn(np.unique(codes[classes == _UNKNOWN]))
            classes = self._classes[codes]
        return classes, 2 + (codes >= 0x800).astype(np.int64) + (codes >= 0x10000)

    def _learn(self, codes: npt.NDArray[np.uint32]) -> None:
        characters = [chr(code) for code in codes]
        text = "".join(characters)
        classes = dict.fromkeys(characters, _OTHER)
        for name, number in ((r"\p{L}", _LETTER), (r"\p{N}", _NUMBER), (r"\s", _WHITE)):
            rest = Split(Regex(name), "removed").pre_tokenize_str(text)
            classes.update(dict.fromkeys(set(characters) - {char for piece, _ in rest for char in piece}, number))
        if " " in classes:
            classes[" "] = _SPACE
        self._classes[codes] = [classes[char] for char in characters]


def _beginnings(codes: npt.NDArray[np.uint8], classes: npt.NDArray[np.uint8]) -> Flags:
    """Where a piece begins: bool (bytes,)."""
    before, after = np.full_like(classes, _SEPARATOR), np.full_like(classes, _SEPARATOR)
    before[1:], after[:-1] = classes[:-1], classes[1:]
    white = (classes == _SPACE) | (classes == _WHITE)
    begins = (classes != before) & (before != _SPACE) & ~white
    # White space: at the run's beginning, and at its last character if anything follows.
    begins |= white & (after <= _NUMBER)
    white[1:] &= ~white[:-1]
    begins |= white

    # Each text ends with a separator, so there is always one byte after an apostrophe, and two after two.
    at = np.flatnonzero((codes == _APOSTROPHE) & begins)
    first, second = codes[at + 1], codes[np.minimum(at + 2, len(codes) - 1)]
    short = (first == _S) | (first == _T) | (first == _M) | (first == _D)
    long = (second == _E) & ((first == _R) | (first == _V)) | (first == _L) & (second == _L)
    begins[at[short | long] + 1] = False
    begins[at[short] + 2] = True
    begins[at[long] + 3] = True
    return begins | (classes == _SEPARATOR)


def _pieces(data: bytes, begins: Flags, codes: npt.NDArray[np.uint8]) -> Pieces:
    starts = np.flatnonzero(begins)
    separators = np.searchsorted(starts, np.flatnonzero(codes == _SEPARATOR_BYTE[0]))
    return Pieces(data, starts, np.append(starts[1:], len(data)), separators)
