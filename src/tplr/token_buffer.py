"""A first-in, first-out buffer of token arrays: where batches of pages and chunks of streams are cut from."""

from collections import deque

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class TokenBuffer:
    """Arrays that are put in are joined to one stream; each token is copied once, when it is taken.

    Args:
        skip: tokens at the beginning of the first array that are never taken.

    Attributes:
        length: tokens that can be taken; below 0 until as many were put in as are skipped.
        finished: number of arrays that are used up.
        offset: tokens of the next array that are used up.
    """

    def __init__(self, skip: int = 0) -> None:
        self.length = -skip
        self.finished = 0
        self.offset = skip
        self._arrays: deque[npt.NDArray[np.integer]] = deque()

    def put(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append an array, which must not change any more."""
        self._arrays.append(tokens)
        self.length += len(tokens)

    def take(self, count: int) -> Tokens:
        """The next ``count <= length`` tokens, as an array of their own."""
        self.length -= count
        end = self.offset + count
        if self._arrays and end < len(self._arrays[0]):  # most often: one slice is much faster
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
        """A copy of all tokens that can be taken."""
        return np.concatenate([np.empty(0, np.int64), *self._arrays], dtype=np.int64)[self.offset :]
