"""pad: fills token columns up to one length."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from tplr.streams.iterator import Transform
from tplr.streams.transforms.token_transform import TokenTransform
from tplr.streams.transforms.tokens import Columns, token_array


class Pad(TokenTransform):
    """Appends ``pad_values[column]`` to each of these columns up to ``length`` tokens; other columns stay."""

    def __init__(self, source: Transform, pad_values: Mapping[str, int], length: int) -> None:
        if not isinstance(length, Integral) or length < 1 or not pad_values:
            raise ValueError(
                f"pad: expected a whole length above 0 and columns to pad, got {length} and {dict(pad_values)}"
            )
        self.sources = (source,)
        self.pad_values = dict(pad_values)
        self.length = length

    def describe(self, *, pinned: bool) -> str:
        return f"pad({self.length}, {', '.join(f'{column}: {value}' for column, value in self.pad_values.items())})"

    def replaced(self, sample: dict[str, Any]) -> Columns:
        padded = {}
        for column, value in self.pad_values.items():
            if column not in sample:
                raise ValueError(f"pad: the sample has no column {column!r}; it has {sorted(map(str, sample))}")
            tokens = token_array(sample[column], column)
            if len(tokens) > self.length:
                raise ValueError(f"pad: column {column!r} has {len(tokens)} tokens, more than {self.length}")
            padded[column] = np.full(self.length, value, np.int64)
            padded[column][: len(tokens)] = tokens
        return padded
