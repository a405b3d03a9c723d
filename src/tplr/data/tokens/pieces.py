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

# Classes of characters. A separator stands after each text.
_OTHER, _LETTER, _NUMBER, _SPACE, _WHITE, _SEPARATOR, _UNKNOWN = range(7)
_SEPARATOR_CHARACTER = "\U0010ffff"  # no character, for ever
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
        self._classes[ord(_SEPARATOR_CHARACTER)] = _SEPARATOR
        self._byte_classes = self._classes[:256].copy()
        self._byte_classes[0xFF] = _SEPARATOR

    def cut(self, texts: Sequence[str]) -> Pieces:
        """All pieces of texts that ``cuts`` says yes to."""
        if all(text.isascii() for text in texts):
            data = "\xff".join([*texts, ""]).encode("latin-1")
            codes = np.frombuffer(data, np.uint8)
            begins = _beginnings(codes, self._byte_classes[codes])
            starts, ends, separators = _spans(begins, codes == 0xFF)
            return Pieces(data, starts, ends, separators)
        joined = _SEPARATOR_CHARACTER.join([*texts, ""])
        codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
        classes = self._classes[codes]
        if (classes == _UNKNOWN).any():
            self._learn(np.unique(codes[classes == _UNKNOWN]))
            classes = self._classes[codes]
        starts, ends, separators = _spans(_beginnings(codes, classes), classes == _SEPARATOR)
        width = np.ones(len(codes), np.uint8)
        for limit in (0x80, 0x800, 0x10000):
            width += codes >= limit
        byte_at = np.zeros(len(codes) + 1, np.int64)
        np.cumsum(width, out=byte_at[1:])
        return Pieces(joined.encode(), byte_at[starts], byte_at[ends], separators)

    def cuts(self, text: str) -> bool:
        """Whether ``text`` can be cut: almost any can."""
        if text.isascii():
            return True
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return False
        return _SEPARATOR_CHARACTER not in text

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


def _beginnings(codes: npt.NDArray[np.integer], classes: npt.NDArray[np.uint8]) -> Flags:
    """Where a piece begins: bool (characters,)."""
    before, after = np.full_like(classes, _SEPARATOR), np.full_like(classes, _SEPARATOR)
    before[1:], after[:-1] = classes[:-1], classes[1:]
    white = (classes == _SPACE) | (classes == _WHITE)
    begins = (classes != before) & (before != _SPACE)
    # White space: at the run's beginning, and at its last character if anything follows.
    white_before = np.zeros_like(white)
    white_before[1:] = white[:-1]
    begins = np.where(white, ~white_before | (after <= _NUMBER), begins)

    # Each text ends with a separator, so there is always one character after an apostrophe, and two after two.
    at = np.flatnonzero((codes == _APOSTROPHE) & begins)
    first, second = codes[at + 1], codes[np.minimum(at + 2, len(codes) - 1)]
    short = (first == _S) | (first == _T) | (first == _M) | (first == _D)
    long = (second == _E) & ((first == _R) | (first == _V)) | (first == _L) & (second == _L)
    begins[at[short | long] + 1] = False
    begins[at[short] + 2] = True
    begins[at[long] + 3] = True
    return begins | (classes == _SEPARATOR)


def _spans(begins: Flags, separator: Flags) -> tuple[npt.NDArray[np.int64], ...]:
    """Starts and ends of the pieces, in characters, and which of them are separators."""
    starts = np.flatnonzero(begins)
    ends = np.empty_like(starts)
    ends[:-1] = starts[1:]
    ends[-1] = len(begins)
    return starts, ends, np.flatnonzero(separator[starts])
