"""batch: collates several samples into one."""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np

from tplr.sharding import Share
from tplr.streams.iterator import State, StreamIterator, Transform, divided_counts, divided_items
from tplr.streams.state import StateReader


class _BatchIterator(StreamIterator[Any]):
    def __init__(self, transform: "Batch", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._transform = transform
        self._as_arrays = transform.collate is None and source.arrays_for_tensors
        if self._as_arrays:
            source.use_arrays()
        # Empty between two batches, unless the source failed within a batch. A state with another batch size, or from
        # more ranks, may hold more than one batch.
        self._samples: list[Any] = saved.items("samples") if saved else []
        if saved:
            self.counts = saved.counts()

    def items(self) -> Iterator[Any]:
        source, size = self.source.items(), self._transform.size
        while True:
            held = self._samples
            held.extend(islice(source, max(0, size - len(held))))  # keeps the samples before an error
            samples, self._samples = held[:size], held[size:]
            if len(samples) == size or (samples and not self._transform.drop_last):
                yield self._collated(samples)
            elif samples:
                self.counts["dropped_samples"] = self.counts.get("dropped_samples", 0) + len(samples)
            if len(samples) < size:
                return

    def state(self) -> State:
        return {"source": self.source.state(), "samples": list(self._samples), "counts": dict(self.counts)}

    def _collated(self, samples: list[Any]) -> Any:
        if self._transform.collate is not None:
            return self._transform.collate([*map(copy.copy, samples)])  # the source may hold them, to be read again
        import torch
        from torch.utils.data import default_collate

        if self._as_arrays and all(type(value) is np.ndarray for sample in samples for value in sample.values()):
            # Equal to default_collate of tensors, with one copy.
            return {column: torch.from_numpy(np.stack([s[column] for s in samples])) for column in samples[0]}
        return default_collate(samples)


class Batch(Transform):
    """``collate`` of shallow copies of every ``size`` samples; None means ``torch.utils.data.default_collate``.

    At the end of the data the remaining samples form a smaller batch, or are dropped and counted.
    """

    iterator = _BatchIterator
    carries = False

    def __init__(
        self, source: Transform, size: int, collate: Callable[[list[Any]], Any] | None, drop_last: bool
    ) -> None:
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"batch: expected a whole size above 0, got {size}")
        self.sources = (source,)
        self.size, self.collate, self.drop_last = size, collate, drop_last

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        return {"samples": divided_items(saved, "samples", share), "counts": divided_counts(saved, share)}

    def describe(self, *, pinned: bool) -> str:
        return "batch"  # a state is between two batches, so later batches may have another size
