"""pack_chunk: whole documents, as many as fit, in the order they come."""

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns, token_columns


class _PackChunkIterator(ChunkingIterator):
    """``option`` discards documents over ``length`` instead of cutting them off."""

    def raw(self) -> Columns:
        while self.held < self.length:
            try:
                document, size = token_columns(self.source.raw(), self.columns)
            except StopIteration:
                if not self.held:
                    raise
                break
            if size > self.length:
                self.count_dropped(size if self.option else size - self.length)
                if self.option:
                    self.counts["dropped_samples"] = self.counts.get("dropped_samples", 0) + 1
                    continue
                document, size = {column: array[: self.length] for column, array in document.items()}, self.length
            if self.held + size > self.length:
                pack = self.take(self.held)
                self.put(document, size)
                return pack
            self.put(document, size)
        return self.take(self.held)


class PackChunk(Chunking):
    """Packs of at most ``length`` tokens, unpadded; no document is in two packs. A document over ``length`` is cut off
    there, or with ``option`` discarded."""

    name = "pack_chunk"
    iterator = _PackChunkIterator
