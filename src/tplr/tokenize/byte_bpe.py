"""Decides whether tiktoken's BPE gives a tokenizer's ids, and converts the tokenizer's tables for tiktoken.

The ``tokenizers`` library and tiktoken both begin with the bytes of a pre-token and merge the adjacent pair of lowest
rank, leftmost first, until no pair is left. They differ in what a pair is: the library looks up the two parts, tiktoken
looks up their joined bytes. So tiktoken could merge ``ab|c`` where only ``a|bc`` is a listed merge.

It never does so if every token, encoded alone with the listed merges, gives itself. Proof: let S be a token of rank r
whose bytes are whole parts of a pre-token when no merge of a rank below r is left. Parts only grow, so no merge has
crossed the ends of S. So S was merged as it is alone, where its last two parts are a listed pair. If several pairs of
one token are listed, only that pair ever occurs.

A token that does not give itself never occurs in either library and is left out. With ``ignore_merges`` the library
looks up whole pre-tokens first; then such a token gets the last rank, if no two of its parts can be merged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from tplr.tokenize.ragged import Ids

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

# Patterns that match every character, and mean the same to both regular expression engines as far as their character
# classes are the same.
PATTERNS = frozenset(
    {
        GPT2_PATTERN,
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE,  # cl100k, Llama 3
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE,  # Qwen 2
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACE,  # o200k
    }
)


class NotByteBPE(Exception):
    """Tiktoken may give other ids than the tokenizer; the message says why."""


@dataclass(frozen=True)
class ByteBPE:
    """Everything that determines the ids of a text without added tokens.

    Attributes:
        ranks: bytes of each token -> its rank, dense from 0; the 256 single bytes first.
        ids: int32 (ranks,): rank -> token id.
        pattern: splits a text into pre-tokens.
        prefix_space: whether a space is put before a text that does not begin with one.
        added: the added tokens.
    """

    ranks: Mapping[bytes, int]
    ids: Ids
    pattern: str
    prefix_space: bool
    added: tuple[str, ...]


def byte_bpe(definition: str) -> ByteBPE:
    """Tables of the tokenizer that the JSON of ``tokenizers.Tokenizer.to_str`` defines. Raises NotByteBPE."""
    parts = json.loads(definition)
    pattern, prefix_space = split_pattern(parts["pre_tokenizer"])
    if parts["normalizer"] is not None:
        raise NotByteBPE(f"it normalizes texts ({parts['normalizer']['type']})")
    model = parts["model"]
    if model["type"] != "BPE":
        raise NotByteBPE(f"its model is {model['type']}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise NotByteBPE(f"it has {option} {model[option]!r}")
    added = {token["content"] for token in parts["added_tokens"]}
    vocab: dict[str, int] = model["vocab"]
    tokens = _mergeable(vocab, model["merges"], added, whole_pieces=bool(model.get("ignore_merges")))
    byte_of = byte_letters()
    ranks = {bytes(byte_of[letter] for letter in token): rank for rank, token in enumerate(tokens)}
    ids = np.array([vocab[token] for token in tokens], np.int32)
    return ByteBPE(ranks, ids, pattern, prefix_space, tuple(sorted(added)))


def byte_letters() -> dict[str, int]:
    """Character -> the byte that it represents in byte-level vocabularies.

    Source: ``bytes_to_unicode`` of GPT-2's encoder.py: printable bytes are their own character, the others are the
    characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def split_pattern(definition: dict[str, Any] | None) -> tuple[str, bool]:
    """Pattern, one of ``PATTERNS``, and ``add_prefix_space`` of a pre-tokenizer. Raises NotByteBPE."""
    match definition:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": bool(prefix_space)}:
            return GPT2_PATTERN, prefix_space
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if pattern in PATTERNS:
            return pattern, False
    kind = definition["type"] if definition else "none"
    raise NotByteBPE(f"its pre-tokenizer is {kind}, for which tiktoken may split texts differently")


def _mergeable(
    vocab: Mapping[str, int], merges: list[list[str] | str], added: set[str], *, whole_pieces: bool
) -> list[str]:
    """Tokens in rank order. ``whole_pieces``: the model looks up whole pre-tokens first (``ignore_merges``)."""
    pairs: list[tuple[str, str]] = [
        (pair.partition(" ")[0], pair.partition(" ")[2]) if isinstance(pair, str) else (pair[0], pair[1])
        for pair in merges
    ]
    letters = sorted(byte_letters())
    if missing := [letter for letter in letters if letter not in vocab]:
        raise NotByteBPE(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    # Insertion order is rank order. Each token is added once, its merges are consecutive, its parts come before it.
    order = dict.fromkeys(letters)
    last = ""
    for left, right in pairs:
        token = left + right
        if left not in order or right not in order or (token in order and token != last):
            raise NotByteBPE(f"its merge {left!r} {right!r} is out of order")
        order[last := token] = None
    bare = Tokenizer(models.BPE(dict(vocab), pairs))
    candidates = [*order, *(vocab.keys() - order.keys() - added if whole_pieces else ())]
    alone = {token: row.ids for token, row in zip(candidates, bare.encode_batch_fast(candidates), strict=True)}
    tokens = [token for token in order if alone[token] == [vocab[token]]]
    if not whole_pieces:
        return tokens
    known = set(letters)
    for token in sorted(candidates):
        if alone[token] == [vocab[token]] or not set(token) <= known:
            continue  # not made of byte characters: no pre-token equals it
        if len(alone[token]) == 2:
            raise NotByteBPE(f"its token {token!r} has no merge, but tiktoken would merge it")
        tokens.append(token)
    return tokens
