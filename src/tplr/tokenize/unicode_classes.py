"""Finds characters that two regular expression engines put into different classes, as their Unicode versions differ."""

import re

import numpy as np
from tiktoken import Encoding
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_UNKNOWN, _SAME, _DIFFERENT = 0, 1, 2
_BYTES = {bytes([byte]): byte for byte in range(256)}


class UnicodeClasses:
    """Compares the character classes of a pattern between tiktoken and ``tokenizers``.

    A character is compared when it first occurs. Threads may share one object: all find the same.
    """

    def __init__(self, pattern: str) -> None:
        names = sorted({*re.findall(r"\\p\{\w+\}|\\s", pattern), *_folded(pattern)})
        # tiktoken skips characters that a pattern does not match, and returns the bytes of those that it does.
        self._classes = [
            (Encoding("class", pat_str=name, mergeable_ranks=_BYTES, special_tokens={}), Split(Regex(name), "removed"))
            for name in names
        ]
        self._table = np.zeros(0x110000, np.uint8)

    def agree_on(self, text: str) -> bool:
        """Whether each character of ``text`` is in the same classes for tiktoken and for the tokenizers library."""
        try:
            characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        except UnicodeEncodeError:  # a lone surrogate: neither library takes it
            return False
        known = self._table[characters]
        if not known.all():
            self._compare(np.unique(characters[known == _UNKNOWN]))
            known = self._table[characters]
        return not (known == _DIFFERENT).any()

    def _compare(self, characters: np.ndarray) -> None:
        text = "".join(map(chr, characters))
        differ: set[str] = set()
        for tiktokens, rest in self._classes:
            others = {char for piece, _ in rest.pre_tokenize_str(text) for char in piece}
            differ |= set(bytes(tiktokens.encode_ordinary(text)).decode()) ^ (set(text) - others)
        self._table[characters] = [_DIFFERENT if char in differ else _SAME for char in text]


def _folded(pattern: str) -> list[str]:
    """Class of the letters that a case-insensitive pattern matches: Unicode folds further characters to them."""
    return ["(?i:[sdmtlvre])"] if "(?i:" in pattern else []
