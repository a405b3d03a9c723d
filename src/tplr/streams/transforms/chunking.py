"""What chunk, concat_chunk and pack_chunk share: columns of tokens in, tensors out, and every token counted."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Columns, narrowed, tensors


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
    """Counts ``dropped_tokens`` (per column) and ``dropped_samples``: what went in and did not come out."""

    arrays_for_tensors = True

    def __init__(self, transform: Chunking, source: StreamIterator[Any], state: State | None) -> None:
        super().__init__()
        self.source = source
        self.length = transform.length
        self.columns = transform.columns
        self.option = transform.option
        if state:
            self.counts = dict(state["counts"])
        self.begin(state["held"] if state else None)

    def __next__(self) -> dict[str, Any]:
        return tensors(self.raw())

    def state(self) -> State:
        return {"source": self.source.state(), "held": narrowed(self.held()), "counts": self.counts}

    def drop(self, tokens: int) -> None:
        if tokens:
            self.counts["dropped_tokens"] = self.counts.get("dropped_tokens", 0) + tokens

    @abstractmethod
    def begin(self, held: Any) -> None:
        """Start with what ``held()`` gave, or with nothing."""

    @abstractmethod
    def held(self) -> Any:
        """What was taken from the source and neither handed on nor dropped."""

    @abstractmethod
    def raw(self) -> Columns: ...
