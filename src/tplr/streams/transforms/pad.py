"""pad: fills token columns up to one length."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Columns, tensors, token_array


class Pad(Transform):
    """Appends ``pad_values[column]`` to each of these columns up to ``length`` tokens; other columns stay."""

    carries = False

    def __init__(self, source: Transform, pad_values: Mapping[str, int], length: int) -> None:
        if length < 1 or not pad_values:
            raise ValueError(f"pad: expected a length above 0 and columns to pad, got {length} and {dict(pad_values)}")
        self.sources = (source,)
        self.pad_values = dict(pad_values)
        self.length = length

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _PadIterator(self, self.sources[0].open(context, state))

    def describe(self, *, pinned: bool) -> str:
        return f"pad({self.length}, {', '.join(f'{column}: {value}' for column, value in self.pad_values.items())})"


class _PadIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: Pad, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self._transform = transform
        self.arrays_for_tensors = source.arrays_for_tensors

    def __next__(self) -> dict[str, Any]:
        sample, padded = self._padded(self.source.__next__)
        return sample | tensors(padded)

    def raw(self) -> dict[str, Any]:
        sample, padded = self._padded(self.source.raw)
        return sample | padded

    def state(self) -> State:
        return self.source.state()

    def _padded(self, take: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Columns]:
        sample = take()
        padded = {}
        for column, value in self._transform.pad_values.items():
            if column not in sample:
                raise ValueError(f"pad: the sample has no column {column!r}; it has {sorted(map(str, sample))}")
            tokens = token_array(sample[column], column)
            if len(tokens) > self._transform.length:
                raise ValueError(f"pad: column {column!r} has {len(tokens)} tokens, more than {self._transform.length}")
            padded[column] = np.full(self._transform.length, value, np.int64)
            padded[column][: len(tokens)] = tokens
        return sample, padded
