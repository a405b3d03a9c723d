"""Ends tokenized rows with EOS, by the rule of documented networks."""

import numpy as np

from tplr.tokenize import Ragged
from tplr.tokenize.ragged import offsets_of


def documents(rows: Ragged, eos: int) -> Ragged:
    """Adds EOS to each row that does not end with it, beyond any maximal length; leaves out empty rows."""
    lengths = rows.lengths
    lengths = lengths[lengths > 0]
    ends = np.cumsum(lengths)
    unended = rows.ids[ends - 1] != eos
    return Ragged(np.insert(rows.ids, ends[unended], eos), offsets_of(lengths + unended))
