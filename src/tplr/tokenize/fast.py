"""Byte-level BPE on all cores, wherever the ids are the tokenizer's own."""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from tiktoken import Encoding

from tplr.logging import logger
from tplr.tokenize.byte_bpe import GPT2_PATTERN, ByteBPE
from tplr.tokenize.hf_batch import OwnBatches
from tplr.tokenize.pretokenize import Cutter
from tplr.tokenize.ragged import Ids, Ragged, framed
from tplr.tokenize.token_table import WordTable
from tplr.tokenize.truncate import heads_first
from tplr.tokenize.unicode_classes import AlikeClasses

CHECK_EVERY = 1024  # texts; one of so many is encoded both ways
_AT_ONCE = 2**17  # characters; what is worked on at once should stay in a core's cache
_WORTH_A_THREAD = 4  # so many times that: with less to do, threads wait for each other


class ByWords:
    """Pieces cut by arrays, each piece encoded once: for GPT-2's pattern."""

    def __init__(self, table: ByteBPE) -> None:
        whole = Encoding("templar", pat_str=r"(?s).+", mergeable_ranks=dict(table.ranks), special_tokens={})
        self._cutter = Cutter()
        # What is a token is encoded as that one: the order of ranks is that of how frequent they are.
        tokens = sorted(table.ranks, key=table.ranks.__getitem__)
        ids = table.ids.tolist()
        self._words = WordTable(
            lambda piece: [ids[rank] for rank in whole.encode_ordinary(piece.decode())], tokens, ids
        )

    def takes(self, text: str) -> bool:
        return self._cutter.cuts(text)

    def rows(self, texts: Sequence[str]) -> Ragged:
        return self._words.encode(self._cutter.cut(texts))


class ByTexts:
    """tiktoken, text by text: for other patterns."""

    def __init__(self, table: ByteBPE, own: OwnBatches) -> None:
        self._encoding = Encoding(
            "templar", pat_str=table.pattern, mergeable_ranks=dict(table.ranks), special_tokens={}
        )
        self._ids = table.ids
        self._alike = AlikeClasses(table.pattern)
        self._own = own

    def takes(self, text: str) -> bool:
        return text.isascii() or self._alike.holds(text)

    def rows(self, texts: Sequence[str]) -> Ragged:
        return Ragged.of([self._row(text) for text in texts])

    def _row(self, text: str) -> Ids:
        try:
            return self._ids[self._encoding.encode_to_numpy(text, disallowed_special=())]
        except ValueError:  # a run of hundreds of thousands of spaces is too much for its regular expressions
            return self._own.bodies([text]).ids


class FastBatches:
    """Rows by the fastest way; texts that hold an added token, or anything else that is not sure, go the own way.

    One text of every ``CHECK_EVERY``, the first among them, is encoded the own way too. Should the ids ever differ,
    that is logged as an error, and all texts go the own way from then on.
    """

    def __init__(self, table: ByteBPE, own: OwnBatches, before: Ids, after: Ids) -> None:
        self._way = ByWords(table) if table.pattern == GPT2_PATTERN else ByTexts(table, own)
        self._own = own
        self._before, self._after = before, after
        self._prefix_space = table.prefix_space
        # Cheap to look for: a text without any of these beginnings holds no added token.
        self._beginnings = [re.compile(re.escape(two)) for two in sorted({token[:2] for token in table.added})]
        self._added = re.compile("|".join(map(re.escape, table.added)) or r"(?!)")
        self._seen = 0
        self._lock = threading.Lock()
        self._trusted = True

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        with self._lock:
            first, self._seen = -self._seen % CHECK_EVERY, self._seen + len(texts)
        if self._trusted:
            rows = framed(self._bodies(texts, max_length, one_core), self._before, self._after, max_length)
            if all(self._is_right(texts[i], rows, i, max_length) for i in range(first, len(texts), CHECK_EVERY)):
                return rows
            self._trusted = False
        return self._own.encode_batch(texts, max_length, one_core=one_core)

    def _is_right(self, text: str, rows: Ragged, i: int, max_length: int | None) -> bool:
        ours = rows.ids[rows.offsets[i] : rows.offsets[i + 1]]
        theirs = framed(self._own.bodies([text]), self._before, self._after, max_length).ids
        if equal := np.array_equal(ours, theirs):
            return equal
        logger.error(
            "fast tokenizing gave %d tokens, other than the tokenizer's own %d, for a text of %d characters: %r ...; "
            "from here on the tokenizer's own way is used; earlier ids may be wrong",
            len(ours), len(theirs), len(text), text[:60],
        )  # fmt: skip
        return False

    def _bodies(self, texts: Sequence[str], max_length: int | None, one_core: bool) -> Ragged:
        """Rows without special tokens; of long texts at least ``max_length`` tokens."""
        bodies = partial(self._in_groups, one_core=one_core)
        if max_length is None or not self._own.may_be_cut:
            return bodies(texts)
        return heads_first(bodies, texts, max_length)

    def _in_groups(self, texts: Sequence[str], one_core: bool) -> Ragged:
        groups = [*_groups(texts)]
        threads = 1 if one_core else min(os.cpu_count() or 1, len(groups) // _WORTH_A_THREAD)
        if threads <= 1:
            return Ragged.join(map(self._rows, groups))
        with ThreadPoolExecutor(threads) as pool:
            return Ragged.join(pool.map(self._rows, groups))

    def _rows(self, texts: Sequence[str]) -> Ragged:
        unsure = [i for i, text in enumerate(texts) if self._holds_added(text) or not self._way.takes(text)]
        sure = [*texts]
        for i in unsure:
            sure[i] = ""
        if self._prefix_space:
            sure = [text if not text or text.startswith(" ") else " " + text for text in sure]
        rows = self._way.rows(sure)
        return rows.replaced(unsure, self._own.bodies([texts[i] for i in unsure])) if unsure else rows

    def _holds_added(self, text: str) -> bool:
        return any(two.search(text) for two in self._beginnings) and self._added.search(text) is not None


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Neighbours of about ``_AT_ONCE`` characters together."""
    first, characters = 0, 0
    for i, text in enumerate(texts):
        if characters and characters + len(text) > _AT_ONCE:
            yield texts[first:i]
            first, characters = i, 0
        characters += len(text)
    yield texts[first:]
