"""Encodes with the tokenizer itself: ``tokenizers`` in batches, or calls of a ``transformers`` or other tokenizer."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tplr.concurrency.fork_lock import ForkLock
from tplr.tokenize.ragged import Ids, Ragged, offsets_of
from tplr.tokenize.special_tokens import SpecialTokens
from tplr.tokenize.truncate import can_truncate, encode_truncated


class HFBatchEncoder:
    """Batches of the ``tokenizers`` library, from a private copy of the tokenizer.

    Args:
        definition: JSON of ``Tokenizer.to_str``.

    Attributes:
        can_truncate: see ``truncate.can_truncate``.
    """

    def __init__(self, definition: str, special_tokens: SpecialTokens) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = special_tokens
        self.can_truncate = can_truncate(definition)

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        encode = partial(self.encode_texts, one_core=one_core)
        rows = encode_truncated(encode, texts, max_length if self.can_truncate else None)
        return self._special_tokens.add_to(rows, max_length)

    def encode_texts(self, texts: Sequence[str], *, one_core: bool = False) -> Ragged:
        """Rows without special tokens, not truncated."""
        # The library spreads the texts of one call over all cores.
        calls = [[text] for text in texts] if one_core else [list(texts)]
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        rows = [row.ids for call in calls for row in encode(call)]
        ids = np.fromiter(chain.from_iterable(rows), np.int32, sum(map(len, rows)))
        return Ragged(ids, offsets_of([len(row) for row in rows]))


class HFCallEncoder:
    """Calls any ``transformers`` tokenizer, one call at a time: a tokenizer's truncation setting is shared state."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = ForkLock()

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        with self._lock:
            encoded = self._tokenizer(
                list(texts), truncation=max_length is not None, max_length=max_length, padding=False
            )
        return Ragged.of(encoded["input_ids"])


class CallableEncoder:
    """Calls any tokenizer, text by text, one call at a time: it may not be safe for threads.

    Raises, when it encodes:
        ValueError: the tokenizer does not give a row of ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = ForkLock()

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        arguments = {} if max_length is None else {"truncation": True, "max_length": max_length, "padding": False}
        with self._lock:
            return Ragged.of([_checked(self._tokenizer(text, **arguments)["input_ids"], text) for text in texts])


def _checked(ids: Any, text: str) -> Ids:
    """Return one row of ids as int32, which other numbers would become silently. Raises ValueError."""
    row = np.asarray(ids)
    whole = row.ndim == 1 and (row.dtype.kind in "iu" or not len(row))
    if not whole or (len(row) and not 0 <= row.min() <= row.max() < 2**31):
        raise ValueError(
            f"the tokenizer gives {str(ids)[:60]} for the text {text[:60]!r}: expected a row of integers below 2**31"
        )
    return row.astype(np.int32)
