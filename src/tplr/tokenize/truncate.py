"""Truncates long texts before they are tokenized, where the rest of a text can't change the ids that are kept."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tplr.tokenize.byte_bpe import NotByteBPE, split_pattern
from tplr.tokenize.ragged import Ragged

# At a space between these letters every pattern in ``byte_bpe.PATTERNS``, and every pre-tokenizer that splits at
# spaces, begins a pre-token, whatever the text before and after.
_SAFE_SPLIT = re.compile(r"(?<=[a-z]) (?=[a-z])")
_CHARACTERS_PER_TOKEN = 6  # a text with more on average is tokenized a second time, whole

_SPLIT_AT_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
# Normalizers whose output for a character does not depend on characters beyond a space and a letter.
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}


def encode_truncated(encode: Callable[[Sequence[str]], Ragged], texts: Sequence[str], max_length: int | None) -> Ragged:
    """Rows that begin with the first ``max_length`` ids of ``encode(texts)``, and may continue after them.

    Encodes only the beginning of each long text, then whole texts where the beginning gave too few ids. Use it for
    tokenizers for which ``can_truncate`` holds; ``max_length`` None encodes whole texts.
    """
    if max_length is None:
        return encode(texts)
    heads = [_head(text, max_length) for text in texts]
    rows = encode(heads)
    too_short = [i for i in np.flatnonzero(rows.lengths < max_length).tolist() if len(heads[i]) < len(texts[i])]
    return rows.replaced(too_short, encode([texts[i] for i in too_short])) if too_short else rows


def can_truncate(definition: str) -> bool:
    """Whether ``encode_truncated`` gives the ids of the tokenizer that the JSON of ``Tokenizer.to_str`` defines."""
    parts: dict[str, Any] = json.loads(definition)
    normalizer = parts["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    return (
        _splits_at_spaces(parts["pre_tokenizer"])
        and all(step["type"] in _LOCAL_NORMALIZERS for step in steps)
        and not any(_may_span_a_split(token) for token in parts["added_tokens"])
    )


def _splits_at_spaces(pre_tokenizer: dict[str, Any] | None) -> bool:
    try:
        return (pre_tokenizer or {}).get("type") in _SPLIT_AT_SPACES or bool(split_pattern(pre_tokenizer))
    except NotByteBPE:
        return False


def _may_span_a_split(token: dict[str, Any]) -> bool:
    """Whether an added token, or the spaces that it absorbs, can contain a safe split."""
    text = token["content"]
    absorbs_spaces = token["lstrip"] or token["rstrip"]
    return " " in text or (absorbs_spaces and (text[:1].isalpha() or text[-1:].isalpha()))


def _head(text: str, tokens: int) -> str:
    """The beginning of a text, up to a safe split; probably ``tokens`` tokens or more."""
    least = _CHARACTERS_PER_TOKEN * tokens
    split = _SAFE_SPLIT.search(text, least) if len(text) > least else None
    return text[: split.start()] if split else text
