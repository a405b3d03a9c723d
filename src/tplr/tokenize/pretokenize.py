"""Splits texts into pre-tokens as GPT-2's pattern does, with array operations.

The pattern, whose alternatives are tried in this order from the end of the last pre-token::

    's|'t|'re|'ve|'m|'ll|'d | ?\\p{L}+ | ?\\p{N}+ | ?[^\\s\\p{L}\\p{N}]+ | \\s+(?!\\S) | \\s+

So a pre-token begins where the class of characters changes, with these exceptions: a space belongs to the pre-token
that follows; the last character of a run of white space is a pre-token of its own, or part of the next one, if anything
follows the run; and a contraction is a pre-token if its apostrophe begins one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

# Classes of characters. A separator, a byte that UTF-8 never contains, follows each text.
_OTHER, _LETTER, _NUMBER, _SPACE, _WHITE, _SEPARATOR, _UNKNOWN = range(7)
_SEPARATOR_BYTE = b"\xff"
_ASCII = bytes(range(128))
_APOSTROPHE, _D, _E, _L, _M, _R, _S, _T, _V = b"'delmrstv"

Flags = npt.NDArray[np.bool_]


class PreTokens(NamedTuple):
    """The pre-tokens of several texts, one text after another, each text followed by a separator.

    Attributes:
        data: the texts in UTF-8 and their separators.
        starts, ends: int64 (pre-tokens,): byte range of each pre-token in ``data``.
        separators: int64 (texts,): indices of the pre-tokens that are separators.
    """

    data: bytes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    separators: npt.NDArray[np.int64]


class GPT2PreTokenizer:
    """Splits with the character classes of the ``tokenizers`` library, which it looks up at a character's first use.

    Threads may share one object: all find the same.
    """

    def __init__(self) -> None:
        self._classes = np.full(0x110000, _UNKNOWN, np.uint8)
        self._look_up(np.arange(128, dtype=np.uint32))
        self._byte_classes = bytes([*self._classes[:128], *[_OTHER] * 127, _SEPARATOR])

    def split(self, texts: Sequence[str]) -> PreTokens:
        """The pre-tokens of texts that ``accepts`` accepts."""
        data = _SEPARATOR_BYTE.join([*map(str.encode, texts), b""])
        codes = np.frombuffer(data, np.uint8)
        classes = np.frombuffer(data.translate(self._byte_classes), np.uint8)
        if all(map(str.isascii, texts)):
            return _pre_tokens(data, _beginnings(codes, classes), codes)
        # Give each byte the class of its character: a class then changes only at a character's first byte.
        at = np.flatnonzero((codes >= 0x80) & (codes < 0xFF))
        of_characters, widths = self._beyond_ascii(data)
        classes = classes.copy()
        classes[at] = np.repeat(of_characters, widths)
        begins = _beginnings(codes, classes)
        # A run of white space was split before its last byte; move that to the first byte of its last character.
        firsts = np.repeat(at[np.cumsum(widths) - widths], widths)
        inside = begins[at] & (at > firsts)
        begins[at[inside]] = False
        begins[firsts[inside]] = True
        return _pre_tokens(data, begins, codes)

    def accepts(self, text: str) -> bool:
        """False for texts with a lone surrogate, which UTF-8 can't encode."""
        if text.isascii():
            return True
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        return True

    def _beyond_ascii(self, data: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Class and number of bytes of each character beyond ASCII, in order."""
        characters = data.translate(None, _ASCII + _SEPARATOR_BYTE).decode()
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        classes = self._classes[codes]
        if (classes == _UNKNOWN).any():
            self._look_up(np.unique(codes[classes == _UNKNOWN]))
            classes = self._classes[codes]
        return classes, 2 + (codes >= 0x800).astype(np.int64) + (codes >= 0x10000)

    def _look_up(self, codes: npt.NDArray[np.uint32]) -> None:
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
    """bool (bytes,): whether a pre-token begins at a byte."""
    before, after = np.full_like(classes, _SEPARATOR), np.full_like(classes, _SEPARATOR)
    before[1:], after[:-1] = classes[:-1], classes[1:]
    white = (classes == _SPACE) | (classes == _WHITE)
    begins = (classes != before) & (before != _SPACE) & ~white
    # White space: at the run's first character, and at its last one if anything follows.
    begins |= white & (after <= _NUMBER)
    white[1:] &= ~white[:-1]
    begins |= white

    # Each text ends with a separator, so an apostrophe is never the last byte.
    at = np.flatnonzero((codes == _APOSTROPHE) & begins)
    first, second = codes[at + 1], codes[np.minimum(at + 2, len(codes) - 1)]
    short = (first == _S) | (first == _T) | (first == _M) | (first == _D)
    long = (second == _E) & ((first == _R) | (first == _V)) | (first == _L) & (second == _L)
    begins[at[short | long] + 1] = False
    begins[at[short] + 2] = True
    begins[at[long] + 3] = True
    return begins | (classes == _SEPARATOR)


def _pre_tokens(data: bytes, begins: Flags, codes: npt.NDArray[np.uint8]) -> PreTokens:
    starts = np.flatnonzero(begins)
    separators = np.searchsorted(starts, np.flatnonzero(codes == _SEPARATOR_BYTE[0]))
    return PreTokens(data, starts, np.append(starts[1:], len(data)), separators)
