"""A tokenizer's own batch encoding."""

import threading
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tplr.tokenize.ragged import Ids, Ragged, framed, offsets_of
from tplr.tokenize.truncate import heads_first, may_be_cut

_NONE: Ids = np.empty(0, np.int32)


class OwnBatches:
    """Of the tokenizers library, on all cores, from a copy that nobody else can change.

    Args:
        definition: JSON of ``Tokenizer.to_str``.
        before, after: special tokens that each row gets.

    Attributes:
        may_be_cut: whether the beginning of a text is enough for the beginning of its ids.
    """

    def __init__(self, definition: str, before: Ids = _NONE, after: Ids = _NONE) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._before, self._after = before, after
        self.may_be_cut = may_be_cut(definition)

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        bodies = partial(self.bodies, one_core=one_core)
        rows = bodies(texts) if max_length is None or not self.may_be_cut else heads_first(bodies, texts, max_length)
        return framed(rows, self._before, self._after, max_length)

    def bodies(self, texts: Sequence[str], *, one_core: bool = False) -> Ragged:
        """Rows without special tokens, uncut."""
        # The library spreads the texts of one call over its threads.
        calls = [[text] for text in texts] if one_core else [list(texts)]
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        rows = [row.ids for call in calls for row in encode(call)]
        ids = np.fromiter(chain.from_iterable(rows), np.int32, sum(map(len, rows)))
        return Ragged(ids, offsets_of([len(row) for row in rows]))


class OneCallAtATime:
    """Of any tokenizer of ``transformers``; its truncation setting is shared state."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        with self._lock:
            encoded = self._tokenizer(
                list(texts), truncation=max_length is not None, max_length=max_length, padding=False
            )
        return Ragged.of(encoded["input_ids"])
