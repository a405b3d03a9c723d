"""Byte-level BPE through tiktoken, wherever the ids are the tokenizer's own."""

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from tiktoken import Encoding

from tplr.data.tokens.alike import AlikeClasses
from tplr.data.tokens.byte_bpe import ByteBPE
from tplr.data.tokens.own import OwnBatches
from tplr.data.tokens.ragged import Ids, Ragged, framed, offsets_of
from tplr.logging import logger

CHECK_EVERY = 1024  # texts; one of so many is encoded both ways
_TEXTS_WORTH_A_THREAD = 64 * 1024  # characters


class FastBatches:
    """Rows on all cores; texts that hold an added token, or a character that is not surely alike, go the own way.

    One text of every ``CHECK_EVERY``, the first among them, is encoded the own way too. Should the ids ever differ,
    that is logged as an error and all texts go the own way from then on.
    """

    def __init__(self, table: ByteBPE, own: OwnBatches, before: Ids, after: Ids) -> None:
        self._table = table
        self._own = own
        self._before, self._after = before, after
        self._encoding = Encoding(
            "templar", pat_str=table.pattern, mergeable_ranks=dict(table.ranks), special_tokens={}
        )
        self._alike = AlikeClasses(table.pattern)
        # Cheap to look for: no text without one of these beginnings holds an added token.
        self._beginnings = sorted({token[:2] for token in table.added})
        self._added = re.compile("|".join(map(re.escape, table.added)) or r"(?!)")
        self._seen = 0
        self._lock = threading.Lock()
        self._trusted = True

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """See ``encoder.Encoder``."""
        with self._lock:
            first, self._seen = -self._seen % CHECK_EVERY, self._seen + len(texts)
        rows = self._bodies(texts) if self._trusted else self._own.bodies(texts)
        for i in range(first, len(texts) if self._trusted else 0, CHECK_EVERY):
            ours, theirs = rows.ids[rows.offsets[i] : rows.offsets[i + 1]], self._own.bodies([texts[i]]).ids
            if not np.array_equal(ours, theirs):
                self._trusted = False
                logger.error(
                    "fast tokenizing gave %d tokens, other than the tokenizer's own %d, for a text of %d characters: "
                    "%r ...; from here on the tokenizer's own ids are used, earlier ones may be wrong",
                    len(ours), len(theirs), len(texts[i]), texts[i][:60],
                )  # fmt: skip
                rows = self._own.bodies(texts)
                break
        return framed(rows, self._before, self._after, max_length)

    def _bodies(self, texts: Sequence[str]) -> Ragged:
        """Rows without special tokens, uncut, in texts' order."""
        threads = min(os.cpu_count() or 1, 1 + sum(map(len, texts)) // _TEXTS_WORTH_A_THREAD, len(texts))
        if threads <= 1:
            return self._serial(texts)
        cuts = [len(texts) * i // (2 * threads) for i in range(2 * threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            return Ragged.join(pool.map(lambda cut: self._serial(texts[slice(*cut)]), pairwise(cuts)))

    def _serial(self, texts: Sequence[str]) -> Ragged:
        rows = [self._row(text) for text in texts]
        if own := [i for i, row in enumerate(rows) if row is None]:
            for i, row in zip(own, self._own.bodies([texts[i] for i in own]).rows(), strict=True):
                rows[i] = row
        found = [row for row in rows if row is not None]
        ids = np.concatenate([np.empty(0, np.int32), *found])
        return Ragged(ids, offsets_of([len(row) for row in found]))

    def _row(self, text: str) -> Ids | None:
        """The ids of a text, or None if it has to go the own way."""
        if not text:
            return np.empty(0, np.int32)
        if any(beginning in text for beginning in self._beginnings) and self._added.search(text):
            return None
        if not text.isascii() and not self._alike.holds(text):
            return None
        if self._table.prefix_space and not text.startswith(" "):
            text = " " + text
        try:
            return self._table.ids[self._encoding.encode_to_numpy(text, disallowed_special=())]
        except ValueError:  # a run of hundreds of thousands of spaces is too much for its regular expressions
            return None
