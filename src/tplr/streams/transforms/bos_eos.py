"""add_bos_eos and ensure_bos_eos: add the first and last token of a document."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Tokens, tensors, token_array

_PROBE = "A tokenizer shows by this text what it adds."


class BosEos(Transform):
    """Adds ``bos`` before and ``eos`` after the tokens of a column; None adds nothing."""

    carries = False

    def __init__(self, source: Transform, bos: int | None, eos: int | None, column: str) -> None:
        self.sources = (source,)
        self.bos, self.eos, self.column = bos, eos, column

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _BosEosIterator(self, self.sources[0].open(context, state))

    def describe(self, *, pinned: bool) -> str:
        return f"bos_eos({self.bos}, {self.eos}, {self.column})"


def missing_bos_eos(tokenizer: Any) -> tuple[int | None, int | None]:
    """BOS and EOS, each None if the tokenizer adds it by itself.

    If both are the same token, a document needs it once: at the end, unless the tokenizer adds it anywhere.

    Raises:
        ValueError: ``encode`` and the call disagree about the same text.
    """
    encoded, called = list(tokenizer.encode(_PROBE)), list(tokenizer(_PROBE)["input_ids"])
    if encoded != called:
        raise ValueError(
            f"this tokenizer's encode() gives {encoded[:3]}…{encoded[-3:]} where the call gives "
            f"{called[:3]}…{called[-3:]}: set its bos/eos behaviour, or use add_bos_eos"
        )
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    has_bos = bos is not None and encoded[:1] == [bos]
    has_eos = eos is not None and encoded[-1:] == [eos]
    if bos is not None and bos == eos:
        return None, (None if has_bos or has_eos else eos)
    return (None if has_bos else bos), (None if has_eos else eos)


class _BosEosIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: BosEos, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self._column = transform.column
        self._head = np.array([] if transform.bos is None else [transform.bos], np.int64)
        self._tail = np.array([] if transform.eos is None else [transform.eos], np.int64)

    def __next__(self) -> dict[str, Any]:
        sample, tokens = self._ended(self.source.__next__)
        return sample | tensors({self._column: tokens})

    def raw(self) -> dict[str, Any]:
        sample, tokens = self._ended(self.source.raw)
        return sample | {self._column: tokens}

    def state(self) -> State:
        return self.source.state()

    def _ended(self, take: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Tokens]:
        sample = take()
        if self._column not in sample:
            raise KeyError(f"the sample has no column {self._column!r}; it has {sorted(map(str, sample))}")
        tokens = token_array(sample[self._column], self._column)
        return sample, np.concatenate([self._head, tokens, self._tail])
