"""What chunk, concat_chunk and pack_chunk share: columns of tokens in, tensors out, every dropped token counted."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Columns, narrowed, tensors, token_columns
from tplr.token_buffer import TokenBuffer


class Chunking(Transform):
    """A step that cuts documents to ``length`` tokens.

    Raises:
        ValueError: ``length`` is below 1, or there is no column.
    """

    name: str
    iterator: "type[ChunkingIterator]"

    def __init__(self, source: Transform, length: int, columns: Sequence[str], option: bool = False) -> None:
        if length < 1 or isinstance(columns, str) or not columns:
            raise ValueError(
                f"{self.name}: expected a length above 0 and a sequence of columns, got {length} and {columns!r}"
            )
        self.sources = (source,)
        self.length = length
        self.columns = tuple(columns)
        self.option = option

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return self.iterator(self, self.sources[0].open(context, state["source"] if state else None), state)

    def describe(self, *, pinned: bool) -> str:
        return f"{self.name}({self.length}, {', '.join(self.columns)}{', option' if self.option else ''})"


class ChunkingIterator(StreamIterator[dict[str, Any]]):
    """Buffers the source's documents. Counts ``dropped_tokens`` (per column) and ``dropped_samples``: what went in and
    did not come out.

    Attributes:
        option: see the subclasses.
    """

    arrays_for_tensors = True

    def __init__(self, transform: Chunking, source: StreamIterator[Any], state: State | None) -> None:
        super().__init__()
        self.source = source
        self.length = transform.length
        self.columns = transform.columns
        self.option = transform.option
        self._buffers = {column: TokenBuffer() for column in transform.columns}
        if state:
            self.counts = dict(state["counts"])
            if state["held"]:
                self.put(*token_columns(state["held"], self.columns))

    def __next__(self) -> dict[str, Any]:
        return tensors(self.raw())

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

    @abstractmethod
    def raw(self) -> Columns: ...
