"""chunk: each document is cut by itself; no chunk holds two."""

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns, token_columns


class _ChunkIterator(ChunkingIterator):
    """``option`` drops a document's tail that fills no chunk. One document is cut at a time, so slices of it do; a
    ``TokenBuffer`` takes twice as long."""

    _document: Columns = {}  # noqa: RUF012 - never changed
    _size = _at = 0  # tokens of the document, and those that are cut off

    def raw(self) -> Columns:
        while (left := self._size - self._at) < self.length:
            if left and not self.option:
                break
            self.count_dropped(left)
            self._size = self._at = 0
            self._document, self._size = token_columns(self.source.raw(), self.columns)
        start, self._at = self._at, min(self._at + self.length, self._size)
        return {column: array[start : self._at].copy() for column, array in self._document.items()}

    def put(self, columns: Columns, length: int) -> None:
        self._document, self._size = columns, length

    def peek(self) -> Columns | None:
        if self._at == self._size:
            return None
        return {column: array[self._at :] for column, array in self._document.items()}


class Chunk(Chunking):
    """Chunks of exactly ``length`` tokens, or with ``option`` off also a document's shorter tail. Empty documents
    leave nothing."""

    name = "chunk"
    iterator = _ChunkIterator
