"""pack_chunk: whole documents, as many as fit, in the order they come."""

from typing import Any

import numpy as np

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns, token_columns


class _PackChunkIterator(ChunkingIterator):
    """``option`` discards documents over ``length`` instead of cutting them off."""

    def begin(self, held: Any) -> None:
        self._documents: list[Columns] = []
        self._size = 0
        if held:
            self._put(*token_columns(held, self.columns))

    def raw(self) -> Columns:
        while self._size < self.length:
            try:
                document, size = token_columns(self.source.raw(), self.columns)
            except StopIteration:
                if not self._size:
                    raise
                break
            if size > self.length:
                self.drop(size if self.option else size - self.length)
                if self.option:
                    self.counts["dropped_samples"] = self.counts.get("dropped_samples", 0) + 1
                    continue
                document, size = {column: array[: self.length] for column, array in document.items()}, self.length
            if self._size + size > self.length:
                pack = self.held()
                self.begin(None)
                self._put(document, size)
                return pack
            self._put(document, size)
        pack = self.held()
        self.begin(None)
        return pack

    def held(self) -> Any:
        empty = np.empty(0, np.int64)
        return {
            column: np.concatenate([empty, *(document[column] for document in self._documents)])
            for column in self.columns
        }

    def _put(self, document: Columns, size: int) -> None:
        if size:
            self._documents.append(document)
            self._size += size


class PackChunk(Chunking):
    """Packs of at most ``length`` tokens, unpadded; no document lies in two. One over ``length`` is cut off there, or
    with ``option`` discarded."""

    name = "pack_chunk"
    iterator = _PackChunkIterator
