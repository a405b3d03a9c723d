"""chunk: each document cut by itself, never two in one chunk."""

from typing import Any

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns, token_columns


class _ChunkIterator(ChunkingIterator):
    """``option`` drops a document's tail that fills no chunk."""

    def begin(self, held: Any) -> None:
        self._document, self._size = token_columns(held, self.columns) if held else ({}, 0)
        self._at = 0

    def raw(self) -> Columns:
        while True:
            left = self._size - self._at
            if left >= self.length or (left and not self.option):
                start, self._at = self._at, min(self._at + self.length, self._size)
                return {column: array[start : self._at].copy() for column, array in self._document.items()}
            self.drop(left)
            self._size = self._at = 0
            self._document, self._size = token_columns(self.source.raw(), self.columns)

    def held(self) -> Any:
        if self._at == self._size:
            return None
        return {column: array[self._at :] for column, array in self._document.items()}


class Chunk(Chunking):
    """Chunks of exactly ``length`` tokens, or with ``option`` off also a document's shorter tail. Empty documents
    leave nothing."""

    name = "chunk"
    iterator = _ChunkIterator
