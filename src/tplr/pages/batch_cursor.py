"""The position of a reader of pages, batch after batch; it can be saved and restored."""

from collections.abc import Mapping
from typing import Any

from tplr.errors import StateError
from tplr.token_buffer import TokenBuffer, Tokens
from tplr.tokenize.ragged import Ids

VERSION = 1
_FIELDS = {"version", "of", "page", "token"}


class BatchCursor:
    """Cuts the streams of pages, one after another, into batches.

    Args:
        page, token: the position to begin at; the first stream that is added is that of ``page``.
    """

    def __init__(self, batch_size: int, sequence_length: int, page: int = 0, token: int = 0) -> None:
        self._shape = batch_size, sequence_length
        self._first_page = self.next_page = page
        self._tokens = TokenBuffer(skip=token)

    @property
    def page(self) -> int:
        """Index of the page in which the next batch begins."""
        return self._first_page + self._tokens.finished

    @property
    def token(self) -> int:
        """How many tokens of that page's stream are used up."""
        return self._tokens.offset

    @property
    def is_ready(self) -> bool:
        """Whether there is a whole batch."""
        return self._tokens.length >= self._shape[0] * self._shape[1]

    def add(self, stream: Ids) -> None:
        """Append the stream of page ``next_page``."""
        self._tokens.put(stream)
        self.next_page += 1

    def cut(self) -> Tokens:
        """The next batch, int64 (batch_size, sequence_length): a copy. There must be one."""
        return self._tokens.take(self._shape[0] * self._shape[1]).reshape(self._shape)

    def state(self, of: str) -> dict[str, Any]:
        """Plain values to resume from; ``of`` identifies everything else that the batches follow from."""
        return {"version": VERSION, "of": of, "page": self.page, "token": self.token}


def checked_position(state: Mapping[str, Any], of: str, pages: int) -> tuple[int, int]:
    """Page and token of a saved state.

    Raises:
        StateError: it is no such state, or one of other batches.
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
