"""concat_chunk: all documents in one stream, cut to equal chunks."""

from typing import Any

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns, TokenStream, token_columns


class _ConcatChunkIterator(ChunkingIterator):
    def begin(self, held: Any) -> None:
        self._stream = TokenStream(self.columns, held)

    def raw(self) -> Columns:
        while self._stream.length < self.length:
            try:
                sample = self.source.raw()
            except StopIteration:
                self.drop(self._stream.length)
                self.begin(None)
                raise
            self._stream.put(*token_columns(sample, self.columns))
        return self._stream.cut(self.length)

    def held(self) -> Any:
        return self._stream.held()


class ConcatChunk(Chunking):
    """Chunks of exactly ``length`` tokens; the tokens that fill none at the end of the data are dropped."""

    name = "concat_chunk"
    iterator = _ConcatChunkIterator
