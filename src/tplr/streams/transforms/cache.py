"""cache: keeps samples in memory for later passes."""

import copy
from dataclasses import dataclass, field
from typing import Any

from tplr.errors import StateError
from tplr.sharding import Share
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.state import WHOLE, StateReader


@dataclass
class _Memory:
    """The samples of one share by number; ``length`` is their number, known after the first complete pass."""

    samples: dict[int, Any] = field(default_factory=dict)
    length: int | None = None


class Cache(Transform):
    """Keeps every sample of a share by its number; later passes read it from memory.

    If the source has no fixed order (``ordered=False``), only a complete pass is read from memory: parts of two passes
    would repeat some samples and lose others. For the same reason a state saved in such a later pass does not load.
    """

    def __init__(self, source: Transform) -> None:
        self.sources = (source,)
        self._memories: dict[Share, _Memory] = {}

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        saved = self.reader(state)
        return _CacheIterator(self, context, self._memory(context.share or WHOLE, saved), saved)

    def _memory(self, share: Share, saved: StateReader | None) -> _Memory:
        kept = self._memories.setdefault(share, _Memory())
        if self.has_fixed_order():
            return kept
        if saved is None or not saved.integer("index"):
            if kept.length is None:
                kept = self._memories[share] = _Memory()  # not the samples of an incomplete pass
            return kept
        if saved.integer("source_index") < saved.integer("index"):
            raise StateError(
                "cache: the state is of a later pass over samples without a fixed order, which only the process that "
                "saved it had in memory: use a state of the first pass, or ordered=True"
            )
        return _Memory()

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        raise self.of_one_rank()

    def describe(self, *, pinned: bool) -> str:
        return "cache"


class _CacheIterator(StreamIterator[Any]):
    """Opens its source at the first sample that is not in memory."""

    def __init__(self, transform: Cache, context: PipelineContext, memory: _Memory, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._memory = memory
        self._index = saved.integer("index") if saved else 0
        # Position of the source: number of samples it has returned, and its state while it is not open.
        self._source_index = saved.integer("source_index", high=self._index) if saved else 0
        self._source_state: State | None = saved.child() if saved and saved.any("source") is not None else None
        if saved and not self._source_state and self._source_index:
            raise saved.wrong("source", f"a state after {self._source_index} samples")

    def __next__(self) -> Any:
        kept, length = self._memory.samples, self._memory.length
        if length is not None and self._index >= length:
            raise StopIteration
        if self._index not in kept:
            self._fetch()
        self._index += 1
        return copy.copy(kept[self._index - 1])  # later transforms must not change the cached sample

    def state(self) -> State:
        # Samples between the two numbers are from memory; another process reads them again.
        source = self._source_state if self.source is None else self.source.state()
        return {"index": self._index, "source_index": self._source_index, "source": source}

    def _fetch(self) -> None:
        if self.source is None:
            self.source = self._transform.sources[0].open(self._context, self._source_state)
        while self._source_index <= self._index:
            try:
                sample = next(self.source)
            except StopIteration:
                self._memory.length = self._source_index
                raise
            self._memory.samples.setdefault(self._source_index, sample)
            self._source_index += 1
