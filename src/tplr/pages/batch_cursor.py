"""Where a reader of pages stands, batch after batch; a position that can be saved."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tplr.errors import StateError
from tplr.pages.packing import Tokens
from tplr.tokenize.ragged import Ids

VERSION = 1
_FIELDS = {"version", "of", "page", "token"}


class BatchCursor:
    """Cuts the streams of pages, one after another, into batches.

    Attributes:
        page: index of the page that the next batch begins in.
        token: how many tokens of that page's stream are used up.
    """

    def __init__(self, batch_size: int, sequence_length: int, page: int = 0, token: int = 0) -> None:
        self._shape = batch_size, sequence_length
        self._streams: deque[Ids] = deque()  # of ``page`` and those after it
        self._held = 0  # tokens in them
        self.page, self.token = page, token

    @property
    def next_page(self) -> int:
        """Index of the page to be added next."""
        return self.page + len(self._streams)

    @property
    def is_ready(self) -> bool:
        """Whether there is a whole batch."""
        return self._held - self.token >= self._shape[0] * self._shape[1]

    def add(self, stream: Ids) -> None:
        self._streams.append(stream)
        self._held += len(stream)

    def cut(self) -> Tokens:
        """The next batch, int64 (batch_size, sequence_length): a copy. There must be one."""
        batch = np.empty(self._shape[0] * self._shape[1], np.int64)
        filled = 0
        while filled < len(batch):
            stream = self._streams[0]
            part = stream[self.token : self.token + len(batch) - filled]
            batch[filled : filled + len(part)] = part
            filled += len(part)
            self.token += len(part)
            if self.token == len(stream):
                self._streams.popleft()
                self._held -= len(stream)
                self.page, self.token = self.page + 1, 0
        return batch.reshape(self._shape)

    def state(self, of: str) -> dict[str, Any]:
        """Plain values to go on from; ``of`` names everything else that the batches follow from."""
        return {"version": VERSION, "of": of, "page": self.page, "token": self.token}


def checked_position(state: Mapping[str, Any], of: str, pages: int) -> tuple[int, int]:
    """Page and token of a saved state.

    Raises:
        StateError: it is no such state, or of other batches.
    """
    if not isinstance(state, Mapping) or set(state) != _FIELDS or state["version"] != VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"a loader's state has {sorted(_FIELDS)} and version {VERSION}; got {found}")
    if state["of"] != of:
        raise StateError(
            "the state is of other batches: another dataset, page list, tokenizer, batch size, sequence length or "
            "packing; make the loader as it was made then"
        )
    page, token = state["page"], state["token"]
    if type(page) is not int or type(token) is not int or not 0 <= page <= pages or token < 0:
        raise StateError(f"a loader's state: page {page!r}, token {token!r} of {pages} pages is no position")
    return page, token
