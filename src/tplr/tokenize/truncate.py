"""Of a long text only about as much is tokenized as is kept of it, where what follows can't change those ids."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tplr.tokenize.byte_bpe import NotByteBPE, split_pattern
from tplr.tokenize.ragged import Ragged

# Between these letters every pattern of ours, and whatever else splits at spaces, begins a piece at the space or after
# it, whatever stands before or after.
_SURE_CUT = re.compile(r"(?<=[a-z]) (?=[a-z])")
_MOST_PER_TOKEN = 6  # characters; texts with more on average are encoded whole

_SPLIT_AT_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
# What becomes of a character depends on none beyond a space and a letter.
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}


def heads_first(encode: Callable[[Sequence[str]], Ragged], texts: Sequence[str], tokens: int) -> Ragged:
    """Rows of which at least the first ``tokens`` are those of ``encode(texts)``, so far as there are as many."""
    heads = [_head(text, tokens) for text in texts]
    rows = encode(heads)
    too_short = [i for i in np.flatnonzero(rows.lengths < tokens).tolist() if len(heads[i]) < len(texts[i])]
    return rows.replaced(too_short, encode([texts[i] for i in too_short])) if too_short else rows


def may_be_cut(definition: str) -> bool:
    """Whether ``heads_first`` holds for the ids of the tokenizer that the JSON of ``Tokenizer.to_str`` defines."""
    parts: dict[str, Any] = json.loads(definition)
    normalizer = parts["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    return (
        _splits_at_spaces(parts["pre_tokenizer"])
        and all(step["type"] in _LOCAL for step in steps)
        and not any(_may_lie_over_a_cut(token) for token in parts["added_tokens"])
    )


def _splits_at_spaces(pre_tokenizer: dict[str, Any] | None) -> bool:
    try:
        return (pre_tokenizer or {}).get("type") in _SPLIT_AT_SPACES or bool(split_pattern(pre_tokenizer))
    except NotByteBPE:
        return False


def _may_lie_over_a_cut(token: dict[str, Any]) -> bool:
    """An added token's text, or the spaces beside it that are taken for part of it."""
    text = token["content"]
    takes_spaces = token["lstrip"] or token["rstrip"]
    return " " in text or (takes_spaces and (text[:1].isalpha() or text[-1:].isalpha()))


def _head(text: str, tokens: int) -> str:
    """The beginning of a text, likely to be so many tokens."""
    cut = _SURE_CUT.search(text, _MOST_PER_TOKEN * tokens) if len(text) > _MOST_PER_TOKEN * tokens else None
    return text[: cut.start()] if cut else text
