"""Which characters two engines of regular expressions sort into the same classes: they may know different Unicodes."""

import re

import numpy as np
from tiktoken import Encoding
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_UNKNOWN, _ALIKE, _DIFFERENT = 0, 1, 2
_BYTES = {bytes([byte]): byte for byte in range(256)}


class AlikeClasses:
    """Compares the classes that occur in a pattern, character by character, as characters are met.

    Threads may share one: what several find out at once is the same.
    """

    def __init__(self, pattern: str) -> None:
        names = sorted({*re.findall(r"\\p\{\w+\}|\\s", pattern), *_folded(pattern)})
        # Characters that a pattern does not match are skipped; those that it does come back as their bytes.
        self._classes = [
            (Encoding("class", pat_str=name, mergeable_ranks=_BYTES, special_tokens={}), Split(Regex(name), "removed"))
            for name in names
        ]
        self._table = np.zeros(0x110000, np.uint8)

    def holds(self, text: str) -> bool:
        """Whether each character of ``text`` is in the same classes for tiktoken and for the tokenizers library."""
        try:
            characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        except UnicodeEncodeError:  # half of a surrogate pair: no text for either
            return False
        known = self._table[characters]
        if not known.all():
            self._learn(np.unique(characters[known == _UNKNOWN]))
            known = self._table[characters]
        return not (known == _DIFFERENT).any()

    def _learn(self, characters: np.ndarray) -> None:
        text = "".join(map(chr, characters))
        differ: set[str] = set()
        for tiktokens, rest in self._classes:
            others = {char for piece, _ in rest.pre_tokenize_str(text) for char in piece}
            differ |= set(bytes(tiktokens.encode_ordinary(text)).decode()) ^ (set(text) - others)
        self._table[characters] = [_DIFFERENT if char in differ else _ALIKE for char in text]


def _folded(pattern: str) -> list[str]:
    """Letters that stand for both cases, and for whatever Unicode folds to them."""
    return ["(?i:[sdmtlvre])"] if "(?i:" in pattern else []
