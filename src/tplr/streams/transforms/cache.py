"""cache: keeps samples in memory for later passes."""

import copy
from typing import Any

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.state import StateReader


class Cache(Transform):
    """Keeps every sample by its number; later passes read it from memory."""

    def __init__(self, source: Transform) -> None:
        self.sources = (source,)
        self.samples: dict[int, Any] = {}
        self.length: int | None = None  # length of the source; known after the first complete pass

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _CacheIterator(self, context, self.reader(state))

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        raise self.of_one_rank()

    def describe(self, *, pinned: bool) -> str:
        return "cache"


class _CacheIterator(StreamIterator[Any]):
    """Opens its source at the first sample that is not in memory."""

    def __init__(self, transform: Cache, context: PipelineContext, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._index = saved.integer("index") if saved else 0
        # Position of the source: number of samples it has returned, and its state while it is not open.
        self._source_index = saved.integer("source_index") if saved else 0
        self._source_state: State | None = saved.child() if saved and saved.any("source") is not None else None
        if saved and not self._source_state and self._source_index:
            raise saved.wrong("source", f"a state after {self._source_index} samples")

    def __next__(self) -> Any:
        kept, length = self._transform.samples, self._transform.length
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
                self._transform.length = self._source_index
                raise
            self._transform.samples.setdefault(self._source_index, sample)
            self._source_index += 1
