"""chunk: each document is cut by itself; no chunk holds two."""

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns


class _ChunkIterator(ChunkingIterator):
    """``option`` drops a document's tail that fills no chunk."""

    def raw(self) -> Columns:
        while self.held < (self.length if self.option else 1):
            self.drop_held()
            self.put(*self.next_document())
        return self.take(min(self.length, self.held))

    def peek(self) -> Columns | None:
        return super().peek() if self.held else None


class Chunk(Chunking):
    """Chunks of exactly ``length`` tokens, or with ``option`` off also a document's shorter tail. Empty documents
    leave nothing."""

    name = "chunk"
    iterator = _ChunkIterator
