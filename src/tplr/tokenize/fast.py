"""Byte-level BPE with array operations or tiktoken, for texts on which these give the tokenizer's own ids."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from tiktoken import Encoding

from tplr.concurrency.fork_lock import ForkLock
from tplr.logging import logger
from tplr.resources import available_cores
from tplr.tokenize.byte_bpe import GPT2_PATTERN, ByteBPE
from tplr.tokenize.hf_batch import HFBatchEncoder
from tplr.tokenize.pretokenize import GPT2PreTokenizer
from tplr.tokenize.ragged import Ids, Ragged
from tplr.tokenize.special_tokens import SpecialTokens
from tplr.tokenize.token_table import TokenTable
from tplr.tokenize.truncate import encode_truncated
from tplr.tokenize.unicode_classes import UnicodeClasses

CHECK_EVERY = 1024  # texts; one of them is also encoded by the tokenizers library
_GROUP_CHARACTERS = 2**17  # arrays of a group fit into a core's cache
_GROUPS_PER_THREAD = 4  # with fewer, threads wait for each other


class TableBPE:
    """For GPT-2's pattern: splits texts with array operations, and encodes each distinct pre-token once."""

    def __init__(self, tables: ByteBPE) -> None:
        whole = Encoding("templar", pat_str=r"(?s).+", mergeable_ranks=dict(tables.ranks), special_tokens={})
        ids = tables.ids.tolist()
        self._pre_tokenizer = GPT2PreTokenizer()
        self.accepts = self._pre_tokenizer.accepts
        # A pre-token that is a token is encoded as that token. Lower ranks are more frequent.
        by_rank = sorted(tables.ranks, key=tables.ranks.__getitem__)
        self._table = TokenTable(partial(_merged, whole, ids), by_rank, ids)

    def encode_texts(self, texts: Sequence[str]) -> Ragged:
        return self._table.encode(self._pre_tokenizer.split(texts))


class TiktokenBPE:
    """For the other patterns: tiktoken, text by text."""

    def __init__(self, tables: ByteBPE, hf: HFBatchEncoder) -> None:
        self._encoding = Encoding(
            "templar", pat_str=tables.pattern, mergeable_ranks=dict(tables.ranks), special_tokens={}
        )
        self._ids = tables.ids
        self._unicode_classes = UnicodeClasses(tables.pattern)
        self._hf = hf

    def accepts(self, text: str) -> bool:
        return text.isascii() or self._unicode_classes.agree_on(text)

    def encode_texts(self, texts: Sequence[str]) -> Ragged:
        return Ragged.of([self._encode_one(text) for text in texts])

    def _encode_one(self, text: str) -> Ids:
        try:
            return self._ids[self._encoding.encode_to_numpy(text, disallowed_special=())]
        except ValueError:  # hundreds of thousands of spaces in a row exceed a limit of its regular expressions
            return self._hf.encode_texts([text]).ids


class FastEncoder:
    """Encodes with ``TableBPE`` or ``TiktokenBPE``; texts with an added token, or not accepted, go to the library.

    The first text, and every ``CHECK_EVERY``-th after it, is also encoded by the library. If the ids differ, an error
    is logged and the library encodes all texts from then on, the batch at hand included.

    Args:
        hf: the library's encoder of the same tokenizer, with the same special tokens.
    """

    def __init__(self, tables: ByteBPE, hf: HFBatchEncoder, special_tokens: SpecialTokens) -> None:
        self._bpe = TableBPE(tables) if tables.pattern == GPT2_PATTERN else TiktokenBPE(tables, hf)
        self._hf = hf
        self._special_tokens = special_tokens
        self._prefix_space = tables.prefix_space
        # A quick test: a text without the first two characters of any added token holds no added token.
        self._prefixes = [re.compile(re.escape(two)) for two in sorted({token[:2] for token in tables.added})]
        self._added = re.compile("|".join(map(re.escape, tables.added)) or r"(?!)")
        self._seen = 0
        self._lock = ForkLock()
        self._trusted = True

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """See ``encoder.Encoder``."""
        with self._lock:
            first, self._seen = -self._seen % CHECK_EVERY, self._seen + len(texts)
        if self._trusted:
            encode = partial(self._encode_texts, one_core=one_core)
            rows = encode_truncated(encode, texts, max_length if self._hf.can_truncate else None)
            rows = self._special_tokens.add_to(rows, max_length)
            if all(self._is_right(texts[i], rows, i, max_length) for i in range(first, len(texts), CHECK_EVERY)):
                return rows
            self._trusted = False
        return self._hf.encode_batch(texts, max_length, one_core=one_core)

    def _is_right(self, text: str, rows: Ragged, i: int, max_length: int | None) -> bool:
        ours = rows.ids[rows.offsets[i] : rows.offsets[i + 1]]
        theirs = self._special_tokens.add_to(self._hf.encode_texts([text]), max_length).ids
        if equal := np.array_equal(ours, theirs):
            return equal
        logger.error(
            "fast tokenizing gave %d ids that differ from the tokenizer's own %d for a text of %d characters: %r ...; "
            "the tokenizers library is used from now on; earlier ids may be wrong",
            len(ours), len(theirs), len(text), text[:60],
        )  # fmt: skip
        return False

    def _encode_texts(self, texts: Sequence[str], *, one_core: bool) -> Ragged:
        """Rows without special tokens, not truncated."""
        groups = [*_groups(texts)]
        threads = 1 if one_core else min(available_cores(), len(groups) // _GROUPS_PER_THREAD)
        if threads <= 1:
            return Ragged.join(map(self._encode_group, groups))
        with ThreadPoolExecutor(threads) as pool:
            return Ragged.join(pool.map(self._encode_group, groups))

    def _encode_group(self, texts: Sequence[str]) -> Ragged:
        others = [i for i, text in enumerate(texts) if self._has_added_token(text) or not self._bpe.accepts(text)]
        accepted = [*texts]
        for i in others:
            accepted[i] = ""
        if self._prefix_space:
            accepted = [text if not text or text.startswith(" ") else " " + text for text in accepted]
        rows = self._bpe.encode_texts(accepted)
        return rows.replaced(others, self._hf.encode_texts([texts[i] for i in others])) if others else rows

    def _has_added_token(self, text: str) -> bool:
        return any(two.search(text) for two in self._prefixes) and self._added.search(text) is not None


def _merged(whole: Encoding, ids: Sequence[int], pre_token: bytes) -> list[int]:
    """The ids of one pre-token, from the ranks that ``whole`` gives."""
    return [ids[rank] for rank in whole.encode_ordinary(pre_token.decode())]


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Consecutive texts of about ``_GROUP_CHARACTERS`` characters together."""
    first, characters = 0, 0
    for i, text in enumerate(texts):
        if characters and characters + len(text) > _GROUP_CHARACTERS:
            yield texts[first:i]
            first, characters = i, 0
        characters += len(text)
    yield texts[first:]
