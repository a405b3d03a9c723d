"""add_bos_eos and ensure_bos_eos: add the first and last token of a document."""

from typing import Any

import numpy as np

from tplr.streams.iterator import Transform
from tplr.streams.transforms.token_transform import TokenTransform
from tplr.streams.transforms.tokens import Columns, token_array

_PROBE = "A tokenizer shows by this text what it adds."


class BosEos(TokenTransform):
    """Adds ``bos`` before and ``eos`` after the tokens of a column; None adds nothing."""

    def __init__(self, source: Transform, bos: int | None, eos: int | None, column: str) -> None:
        self.sources = (source,)
        self.bos, self.eos, self.column = bos, eos, column
        self._head = np.array([] if bos is None else [bos], np.int64)
        self._tail = np.array([] if eos is None else [eos], np.int64)

    def describe(self, *, pinned: bool) -> str:
        return f"bos_eos({self.bos}, {self.eos}, {self.column})"

    def replaced(self, sample: dict[str, Any]) -> Columns:
        if self.column not in sample:
            raise KeyError(f"the sample has no column {self.column!r}; it has {sorted(map(str, sample))}")
        return {self.column: np.concatenate([self._head, token_array(sample[self.column], self.column), self._tail])}


def missing_bos_eos(tokenizer: Any) -> tuple[int | None, int | None]:
    """Return BOS and EOS, each None if the tokenizer adds it itself.

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
