"""Adds the special tokens that a tokenizer puts before and after each text, and truncates rows to a maximal length."""

from typing import NamedTuple

import numpy as np

from tplr.tokenize.ragged import Ids, Ragged, offsets_of

_NONE: Ids = np.empty(0, np.int32)


class SpecialTokens(NamedTuple):
    """Ids before and after each row, int32 each.

    A tokenizer may have either, both or none; ids that depend on the text are not covered (``encoder`` checks that).
    """

    before: Ids = _NONE
    after: Ids = _NONE

    def add_to(self, rows: Ragged, max_length: int | None) -> Ragged:
        """``before`` + row + ``after`` for each row. Rows are truncated at the right so that the sum is at most
        ``max_length``."""
        before, after = self
        room = None if max_length is None else max(max_length - len(before) - len(after), 0)
        lengths = rows.lengths
        if room is not None and len(lengths) and lengths.max() > room:
            kept = np.minimum(lengths, room)
            position = np.arange(len(rows.ids)) - np.repeat(rows.offsets[:-1], lengths)
            rows, lengths = Ragged(rows.ids[position < room], offsets_of(kept)), kept
        if not len(before) and not len(after):
            return rows
        offsets = offsets_of(lengths + len(before) + len(after))
        ids = np.empty(offsets[-1], np.int32)
        is_text = np.ones(len(ids), bool)
        for i, token in enumerate(before):
            ids[offsets[:-1] + i] = token
            is_text[offsets[:-1] + i] = False
        for i, token in enumerate(after[::-1], 1):
            ids[offsets[1:] - i] = token
            is_text[offsets[1:] - i] = False
        ids[is_text] = rows.ids
        return Ragged(ids, offsets)
