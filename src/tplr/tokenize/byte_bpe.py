"""Which tokenizers are byte-level BPE, such that tiktoken's merging gives their ids; and their tables for it.

Both begin with the bytes of a piece of text and merge the pair of lowest rank, leftmost first, until none is left. They
differ in what a pair is: the tokenizers library looks up the two parts, tiktoken the bytes of both together. So
tiktoken could merge ``ab|c`` where only ``a|bc`` is in the list.

It never does when every token, encoded alone by the listed merges, comes out as itself. For let S be a token of rank r,
and let its bytes stand in a piece as whole parts when no merge below r is left to do. Parts only grow, so no merge ever
went over the ends of S; so S fell apart as it does alone, and alone its last two parts are a listed pair. Where several
pairs of one token are listed, only that one ever arises.

Tokens that don't come out alone never arise in either: they are left out, or, where whole pieces are looked up first
(``ignore_merges``), put last if no two of their parts are left to merge.
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

# Patterns that leave no character out and mean the same to both engines of regular expressions, given that they sort
# characters into the same classes.
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
    """Why a tokenizer's ids are not tiktoken's."""


@dataclass(frozen=True)
class ByteBPE:
    """What decides the ids of a text that holds no added token.

    Attributes:
        ranks: bytes of each token -> its rank, dense from 0; the bytes themselves first.
        ids: int32, rank -> token id.
        pattern: cuts a text into pieces.
        prefix_space: a text that begins with none gets a space.
        added: the added tokens.
    """

    ranks: Mapping[bytes, int]
    ids: Ids
    pattern: str
    prefix_space: bool
    added: tuple[str, ...]


def byte_bpe(definition: str) -> ByteBPE:
    """Tables of the tokenizer that the JSON of ``tokenizers.Tokenizer.to_str`` defines.

    Raises:
        NotByteBPE: tiktoken may give other ids, and why.
    """
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
    """Letter -> the byte it stands for in byte-level vocabularies.

    Source: ``bytes_to_unicode`` of GPT-2's encoder.py: printable bytes stand for themselves, the others for the
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
    raise NotByteBPE(f"its pre-tokenizer is {kind}, in no form that is known to mean the same in tiktoken")


def _mergeable(
    vocab: Mapping[str, int], merges: list[list[str] | str], added: set[str], *, whole_pieces: bool
) -> list[str]:
    """Tokens in the order of their ranks."""
    pairs: list[tuple[str, str]] = [
        (pair.partition(" ")[0], pair.partition(" ")[2]) if isinstance(pair, str) else (pair[0], pair[1])
        for pair in merges
    ]
    letters = sorted(byte_letters())
    if missing := [letter for letter in letters if letter not in vocab]:
        raise NotByteBPE(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    # A dictionary for its order: each token once, its merges all in one place, its parts before it.
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
            continue  # what is not made of bytes is no piece of any text
        if len(alone[token]) == 2:
            raise NotByteBPE(f"its token {token!r} has no merge, but tiktoken would merge it")
        tokens.append(token)
    return tokens
