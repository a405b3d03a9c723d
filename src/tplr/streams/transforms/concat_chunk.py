"""concat_chunk: all documents in one stream, cut into equal chunks."""

from tplr.streams.transforms.chunking import Chunking, ChunkingIterator
from tplr.streams.transforms.tokens import Columns, token_columns


class _ConcatChunkIterator(ChunkingIterator):
    def raw(self) -> Columns:
        while self.held < self.length:
            try:
                document = token_columns(self.source.raw(), self.columns)
            except StopIteration:
                self.drop_held()
                raise
            self.put(*document)
        return self.take(self.length)


class ConcatChunk(Chunking):
    """Chunks of exactly ``length`` tokens; the tokens that fill none at the end of the data are dropped."""

    name = "concat_chunk"
    iterator = _ConcatChunkIterator
