"""A FIFO buffer of token arrays, from which batches of pages and chunks of streams are cut."""

from collections import deque

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class TokenBuffer:
    """Concatenates arrays to one stream; each token is copied once, when it is taken.

    Args:
        skip: number of tokens at the beginning of the stream that are skipped.

    Attributes:
        length: number of tokens that can be taken; negative until ``skip`` tokens have been added.
        finished: number of arrays that have been used up.
        offset: number of used tokens of the next array.
    """

    def __init__(self, skip: int = 0) -> None:
        self.length = -skip
        self.finished = 0
        self.offset = skip
        self._arrays: deque[npt.NDArray[np.integer]] = deque()

    def put(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append an array, which must not be changed afterwards."""
        self._arrays.append(tokens)
        self.length += len(tokens)

    def take(self, count: int) -> Tokens:
        """Remove and return the next ``count <= length`` tokens, as a new array."""
        self.length -= count
        end = self.offset + count
        if self._arrays and end < len(self._arrays[0]):  # the usual case: one slice is much faster
            start, self.offset = self.offset, end
            return self._arrays[0][start:end].astype(np.int64)
        taken = np.empty(count, np.int64)
        filled = 0
        while filled < count:
            array = self._arrays[0]
            part = array[self.offset : self.offset + count - filled]
            taken[filled : filled + len(part)] = part
            filled += len(part)
            self.offset += len(part)
            if self.offset >= len(array):
                self._arrays.popleft()
                self.finished, self.offset = self.finished + 1, 0
        return taken

    def peek(self) -> Tokens:
        """Return a copy of all tokens that can be taken."""
        return np.concatenate([np.empty(0, np.int64), *self._arrays], dtype=np.int64)[self.offset :]
