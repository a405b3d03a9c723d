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
        self._classes = sorted({*re.findall(r"\\p\{\w+\}|\\s", pattern), *_folded(pattern)})
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
        differ = {char for name in self._classes for char in _in_tiktoken(name, text) ^ _in_tokenizers(name, text)}
        state = [_DIFFERENT if char in differ else _ALIKE for char in text]
        self._table[characters] = state


def _folded(pattern: str) -> list[str]:
    """Letters that stand for both cases, and for whatever Unicode folds to them."""
    return ["(?i:[sdmtlvre])"] if "(?i:" in pattern else []


def _in_tiktoken(name: str, text: str) -> set[str]:
    # Characters that a pattern does not match are skipped; those that it does come back as their bytes.
    found = Encoding("class", pat_str=name, mergeable_ranks=_BYTES, special_tokens={}).encode_ordinary(text)
    return set(bytes(found).decode())


def _in_tokenizers(name: str, text: str) -> set[str]:
    rest = Split(Regex(name), "removed").pre_tokenize_str(text)
    return set(text) - {char for piece, _ in rest for char in piece}
