"""Documents of token ids to batches of equal sequences."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


def pack(documents: Sequence[Tokens], batch_size: int, sequence_length: int) -> Tokens:
    """All documents in one stream, cut every ``sequence_length`` tokens; each ends with its one EOS.

    Returns:
        ``(batches, batch_size, sequence_length)``; what does not fill the last batch is dropped.
    """
    return _cut(np.concatenate([np.empty(0, np.int64), *documents]), batch_size, sequence_length)


def pad(documents: Sequence[Tokens], batch_size: int, sequence_length: int, eos: int) -> Tokens:
    """Each document begins a sequence and is filled up with EOS to whole sequences.

    The documented rule, to the letter: a document ends where EOS stands, also inside a text, and one whose length
    without that EOS is a multiple of ``sequence_length`` is not followed by any.

    Returns:
        ``(batches, batch_size, sequence_length)``; what does not fill the last batch is dropped.
    """
    stream = np.concatenate([np.empty(0, np.int64), *documents])
    ends = np.flatnonzero(stream == eos)
    lengths = np.diff(ends, prepend=-1) - 1
    padded = -(-lengths // sequence_length) * sequence_length
    tail = len(stream) - (ends[-1] + 1 if len(ends) else 0)  # tokens after the last EOS follow as they are
    out = np.full(padded.sum() + tail, eos, dtype=np.int64)
    # Where a token goes: its place among the tokens, shifted by the padding and less the EOS before its document.
    shift = np.concatenate([[0], np.cumsum(padded - lengths - 1)])
    keep = stream != eos
    document = np.cumsum(~keep)
    out[(np.arange(len(stream)) + shift[document])[keep]] = stream[keep]
    return _cut(out, batch_size, sequence_length)


def _cut(stream: Tokens, batch_size: int, sequence_length: int) -> Tokens:
    batches = len(stream) // (batch_size * sequence_length)
    return stream[: batches * batch_size * sequence_length].reshape(batches, batch_size, sequence_length)
