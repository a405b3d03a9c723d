"""Rows of text to documents of token ids, by the rule of documented networks."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# A fast tokenizer's truncation setting is shared state, and it uses all cores by itself: one call at a time.
_one_call = threading.Lock()


def encode_rows(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[npt.NDArray[np.int64]]:
    """Each row by itself, cut to ``max_length`` tokens, then ended by one EOS if it does not end so already.

    Rows without a token are left out. Blocking: call it in a thread.

    Args:
        tokenizer: of ``transformers``, with an EOS token.
    """
    if not texts:
        return []
    with _one_call:
        rows = tokenizer(list(texts), truncation=True, max_length=max_length, padding=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [np.array(ids if ids[-1] == eos else [*ids, eos], dtype=np.int64) for ids in rows if len(ids)]
