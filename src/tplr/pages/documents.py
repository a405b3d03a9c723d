"""Rows of text to documents of token ids, by the rule of documented networks."""

import numpy as np

from tplr.tokenize import Ragged
from tplr.tokenize.ragged import offsets_of


def documents(rows: Ragged, eos: int) -> Ragged:
    """Each row ended by one EOS if it does not end so already; rows without a token are left out.

    A row that was cut to a maximal length gets its EOS beyond it.
    """
    lengths = rows.lengths
    lengths = lengths[lengths > 0]
    ends = np.cumsum(lengths)
    unended = rows.ids[ends - 1] != eos
    return Ragged(np.insert(rows.ids, ends[unended], eos), offsets_of(lengths + unended))
