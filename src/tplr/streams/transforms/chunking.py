"""chunk, concat_chunk and pack_chunk: convert columns of tokens to tensors, and count every dropped token."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np

from tplr.sharding import Share
from tplr.streams.iterator import State, StreamIterator, Transform, divided_counts, divided_items
from tplr.streams.state import StateReader
from tplr.streams.transforms.tokens import Columns, narrowed, tensors, token_columns
from tplr.token_buffer import TokenBuffer

DOCUMENT_COLUMNS = ("document_ids", "position_ids")


class Chunking(Transform):
    """Cuts documents to ``length`` tokens; the iterators define how, and the meaning of ``option``.

    Args:
        document_ids: for packs, also return ``DOCUMENT_COLUMNS``.

    Raises:
        ValueError: ``length`` is below 1, there is no column, or one of the names of ``DOCUMENT_COLUMNS`` is taken.
    """

    def __init__(  # noqa: PLR0917
        self,
        source: Transform,
        name: Literal["chunk", "concat_chunk", "pack_chunk"],
        length: int,
        columns: Sequence[str],
        option: bool = False,
        document_ids: bool = False,
    ) -> None:
        if not isinstance(length, Integral) or length < 1 or isinstance(columns, str) or not columns:
            raise ValueError(
                f"{name}: expected a whole length above 0 and a sequence of columns, got {length} and {columns!r}"
            )
        if document_ids and set(columns) & set(DOCUMENT_COLUMNS):
            raise ValueError(f"{name}: document_ids=True adds the columns {DOCUMENT_COLUMNS}; got {columns!r}")
        self.sources = (source,)
        self.document_ids = document_ids
        self.name, self.length, self.columns, self.option = name, length, tuple(columns), option
        self.iterator = _ITERATORS[name]

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        return {"held": divided_items(saved, "held", share), "counts": divided_counts(saved, share)}

    def describe(self, *, pinned: bool) -> str:
        options = f"{', option' if self.option else ''}{', document_ids' if self.document_ids else ''}"
        return f"{self.name}({self.length}, {', '.join(self.columns)}{options})"


class ChunkingIterator(StreamIterator[dict[str, Any]]):
    """Buffers documents. Counts ``dropped_tokens`` (per column) and ``dropped_samples``: input that is not in the
    output.

    Attributes:
        option: see the subclasses.
    """

    arrays_for_tensors = True

    def __init__(self, transform: Chunking, source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        source.use_arrays()
        self.length = transform.length
        self.columns = transform.columns
        self.option = transform.option
        self._buffers = {column: TokenBuffer() for column in transform.columns}
        self._documents: deque[Any] = deque()  # documents of a state, which are read before the source
        if saved:
            self.counts = saved.counts()
            self._documents.extend(_checked(document, saved, self.columns) for document in saved.items("held"))

    def items(self) -> Iterator[dict[str, Any]]:
        return self.chunks() if self.arrays else map(tensors, self.chunks())

    def state(self) -> State:
        held = [*map(narrowed, self.peek()), *self._documents]
        return {"source": self.source.state(), "held": held, "counts": dict(self.counts)}

    @property
    def held(self) -> int:
        """Number of tokens of each column in the buffer."""
        return self._buffers[self.columns[0]].length

    def put(self, columns: Columns, length: int) -> None:
        if length:
            for column, buffer in self._buffers.items():
                buffer.put(columns[column])

    def take(self, length: int) -> Columns:
        return {column: buffer.take(length) for column, buffer in self._buffers.items()}

    def peek(self) -> list[Columns]:
        """Return the buffered documents, or their remaining parts, for a state."""
        return [{column: buffer.peek() for column, buffer in self._buffers.items()}] if self.held else []

    def count_dropped(self, tokens: int) -> None:
        if tokens:
            self.counts["dropped_tokens"] = self.counts.get("dropped_tokens", 0) + tokens

    def drop_held(self) -> None:
        """Empty the buffer."""
        self.count_dropped(self.held)
        self.take(self.held)

    def documents(self) -> Iterator[tuple[Columns, int]]:
        """Yield the token columns of the samples, and their length."""
        while self._documents:
            yield token_columns(self._documents.popleft(), self.columns)
        for sample in self.source.items():
            yield token_columns(sample, self.columns)

    @abstractmethod
    def chunks(self) -> Iterator[Columns]: ...


class _ChunkIterator(ChunkingIterator):
    """Chunks of exactly ``length`` tokens of one document each; ``option`` drops its shorter tail.

    Empty documents yield no chunk. Slices cut one document at a time, because a ``TokenBuffer`` takes twice as long.
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

    def peek(self) -> list[Columns]:
        left = {column: array[self._at :] for column, array in self._document.items()}
        return [left] if self._at < self._size else []


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
    """Packs of at most ``length`` tokens, unpadded: as many whole documents as fit, in input order.

    No document is in two packs. A document longer than ``length`` is truncated, or with ``option`` discarded.
    """

    def __init__(self, transform: Chunking, source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(transform, source, saved)
        self._document_ids = transform.document_ids
        self._lengths: list[int] = []  # tokens of the documents in the buffer

    def peek(self) -> list[Columns]:
        held = super().peek()
        if not held or not self._document_ids:
            return held
        cuts = np.cumsum(self._lengths[:-1])
        split = {column: np.split(array, cuts) for column, array in held[0].items()}
        return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]

    def chunks(self) -> Iterator[Columns]:
        for document, size in self.documents():
            kept = min(size, self.length)
            if kept < size and self.option:
                self.count_dropped(size)
                self.counts["dropped_samples"] = self.counts.get("dropped_samples", 0) + 1
                continue
            self.count_dropped(size - kept)
            pack = self._pack() if self.held + kept > self.length else None
            self.put({column: array[:kept] for column, array in document.items()}, kept)
            self._lengths.append(kept)
            if pack:
                yield pack
        if self.held:
            yield self._pack()

    def _pack(self) -> Columns:
        lengths, self._lengths = self._lengths, []
        pack = self.take(self.held)
        return {**pack, **document_columns(lengths)} if self._document_ids else pack


def document_columns(lengths: Sequence[int]) -> Columns:
    """Return ``DOCUMENT_COLUMNS`` for documents of these lengths: the number of each token's document, without counting
    empty ones, and the token's position in it; both from 0."""
    sizes = np.array([length for length in lengths if length], np.int64)
    ends = np.cumsum(sizes)
    return {
        "document_ids": np.repeat(np.arange(len(sizes)), sizes),
        "position_ids": np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes),
    }


def _checked(document: Any, saved: StateReader, columns: Sequence[str]) -> Any:
    try:
        token_columns(document, columns)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise saved.wrong("held", f"documents with columns of tokens ({error})", document) from error
    return document


_ITERATORS = {"chunk": _ChunkIterator, "concat_chunk": _ConcatChunkIterator, "pack_chunk": _PackChunkIterator}
