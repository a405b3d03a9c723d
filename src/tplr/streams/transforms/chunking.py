"""chunk, concat_chunk and pack_chunk: columns of tokens in, tensors out, every dropped token counted."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tplr.streams.iterator import State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Columns, narrowed, tensors, token_columns
from tplr.token_buffer import TokenBuffer


class Chunking(Transform):
    """Cuts documents to ``length`` tokens; the iterators tell how, and what ``option`` is.

    Raises:
        ValueError: ``length`` is below 1, or there is no column.
    """

    def __init__(
        self,
        source: Transform,
        name: Literal["chunk", "concat_chunk", "pack_chunk"],
        length: int,
        columns: Sequence[str],
        option: bool = False,
    ) -> None:
        if length < 1 or isinstance(columns, str) or not columns:
            raise ValueError(
                f"{name}: expected a length above 0 and a sequence of columns, got {length} and {columns!r}"
            )
        self.sources = (source,)
        self.name, self.length, self.columns, self.option = name, length, tuple(columns), option
        self.iterator = _ITERATORS[name]

    def describe(self, *, pinned: bool) -> str:
        return f"{self.name}({self.length}, {', '.join(self.columns)}{', option' if self.option else ''})"


class ChunkingIterator(StreamIterator[dict[str, Any]]):
    """Buffers documents. Counts ``dropped_tokens`` (per column) and ``dropped_samples``: what went in and
    did not come out.

    Attributes:
        option: see the subclasses.
    """

    arrays_for_tensors = True

    def __init__(self, transform: Chunking, source: StreamIterator[Any], state: State | None) -> None:
        super().__init__(source)
        source.use_arrays()
        self.length = transform.length
        self.columns = transform.columns
        self.option = transform.option
        self._buffers = {column: TokenBuffer() for column in transform.columns}
        if state:
            self.counts = dict(state["counts"])
            if state["held"]:
                self.put(*token_columns(state["held"], self.columns))

    def items(self) -> Iterator[dict[str, Any]]:
        return self.chunks() if self.arrays else map(tensors, self.chunks())

    def state(self) -> State:
        held = self.peek()
        return {"source": self.source.state(), "held": held and narrowed(held), "counts": dict(self.counts)}

    @property
    def held(self) -> int:
        """Tokens of each column in the buffer."""
        return self._buffers[self.columns[0]].length

    def put(self, columns: Columns, length: int) -> None:
        if length:
            for column, buffer in self._buffers.items():
                buffer.put(columns[column])

    def take(self, length: int) -> Columns:
        return {column: buffer.take(length) for column, buffer in self._buffers.items()}

    def peek(self) -> Columns | None:
        """What a state keeps of the buffer."""
        return {column: buffer.peek() for column, buffer in self._buffers.items()}

    def count_dropped(self, tokens: int) -> None:
        if tokens:
            self.counts["dropped_tokens"] = self.counts.get("dropped_tokens", 0) + tokens

    def drop_held(self) -> None:
        """Empty the buffer."""
        self.count_dropped(self.held)
        self.take(self.held)

    def documents(self) -> Iterator[tuple[Columns, int]]:
        """The token columns of the source's samples, and their length."""
        for sample in self.source.items():
            yield token_columns(sample, self.columns)

    @abstractmethod
    def chunks(self) -> Iterator[Columns]: ...


class _ChunkIterator(ChunkingIterator):
    """Chunks of exactly ``length`` tokens of one document each; ``option`` drops its shorter tail.

    Empty documents leave nothing. One document is cut at a time by slices: a ``TokenBuffer`` takes twice as long.
    """

    _document: Columns = {}  # noqa: RUF012 - never changed
    _size = _at = 0  # tokens of the document, and those that are cut off

    def chunks(self) -> Iterator[Columns]:
        yield from self._cut()
        for document, size in self.documents():
            self.put(document, size)
            yield from self._cut()

    def _cut(self) -> Iterator[Columns]:
        while (left := self._size - self._at) >= self.length or (left and not self.option):
            start, self._at = self._at, min(self._at + self.length, self._size)
            yield {column: array[start : self._at].copy() for column, array in self._document.items()}
        self.count_dropped(left)
        self._size = self._at = 0

    def put(self, columns: Columns, length: int) -> None:
        self._document, self._size, self._at = columns, length, 0

    def peek(self) -> Columns | None:
        if self._at == self._size:
            return None
        return {column: array[self._at :] for column, array in self._document.items()}


class _ConcatChunkIterator(ChunkingIterator):
    """All documents in one stream, cut into chunks of exactly ``length`` tokens; an incomplete last one is dropped."""

    def chunks(self) -> Iterator[Columns]:
        documents = self.documents()
        while True:
            while self.held >= self.length:
                yield self.take(self.length)
            if (document := next(documents, None)) is None:
                break
            self.put(*document)
        self.drop_held()


class _PackChunkIterator(ChunkingIterator):
    """Packs of at most ``length`` tokens, unpadded: whole documents, as many as fit, in the order they come.

    No document is in two packs. A document over ``length`` is cut off there, or with ``option`` discarded.
    """

    def chunks(self) -> Iterator[Columns]:
        for document, size in self.documents():
            kept = min(size, self.length)
            if kept < size and self.option:
                self.count_dropped(size)
                self.counts["dropped_samples"] = self.counts.get("dropped_samples", 0) + 1
                continue
            self.count_dropped(size - kept)
            pack = self.take(self.held) if self.held + kept > self.length else None
            self.put({column: array[:kept] for column, array in document.items()}, kept)
            if pack:
                yield pack
        if self.held:
            yield self.take(self.held)


_ITERATORS = {"chunk": _ChunkIterator, "concat_chunk": _ConcatChunkIterator, "pack_chunk": _PackChunkIterator}
