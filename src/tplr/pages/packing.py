"""Arranges tokenized rows as a stream of documents, packed or padded, and cuts it into batches of equal sequences."""

import numpy as np

from tplr.token_buffer import Tokens
from tplr.tokenize.ragged import Ids, Ragged


def packed(rows: Ragged, eos: int) -> Ids:
    """Join rows to one stream of documents: adds EOS to rows that do not end with it, even beyond a maximal length, and
    skips empty rows."""
    lengths = rows.lengths
    ends = np.cumsum(lengths[lengths > 0])
    return np.insert(rows.ids, ends[rows.ids[ends - 1] != eos], eos)


def padded(stream: Ids, sequence_length: int, eos: int) -> Ids:
    """Pad a stream so that each document begins a sequence and is filled with EOS to whole sequences.

    This follows the documented rule exactly: a document ends at each EOS, even inside a text. A document whose length
    without that EOS is a multiple of ``sequence_length`` is not followed by any EOS. Tokens after the last EOS follow
    unchanged.
    """
    ends = np.flatnonzero(stream == eos)
    lengths = np.diff(ends, prepend=-1) - 1
    paddings = -lengths % sequence_length
    runs = np.empty(2 * len(lengths) + 1, np.int64)  # a document, its padding, ..., the tail
    runs[:-1:2], runs[1::2] = lengths, paddings
    runs[-1] = len(stream) - len(ends) - lengths.sum()
    is_token = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
    out = np.full(len(is_token), eos, stream.dtype)
    out[is_token] = np.delete(stream, ends)
    return out


def batches(stream: Ids, batch_size: int, sequence_length: int) -> Tokens:
    """Cut a stream into int64 ``(batches, batch_size, sequence_length)``; drop an incomplete last batch."""
    count = len(stream) // (batch_size * sequence_length)
    whole = stream[: count * batch_size * sequence_length]
    return whole.astype(np.int64).reshape(count, batch_size, sequence_length)
