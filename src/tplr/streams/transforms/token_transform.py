"""Base class of pad and add_bos_eos: replaces token columns of each sample, without a state."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from tplr.streams.iterator import PassingIterator, State, StreamIterator, Transform
from tplr.streams.state import StateReader
from tplr.streams.transforms.tokens import Columns, tensors


class _TokenIterator(PassingIterator[dict[str, Any]]):
    def __init__(self, transform: "TokenTransform", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._transform = transform

    def items(self) -> Iterator[dict[str, Any]]:
        replaced, arrays = self._transform.replaced, self.arrays
        for sample in self.source.items():
            yield sample | (replaced(sample) if arrays else tensors(replaced(sample)))

    def state(self) -> State:
        return self.source.state()


class TokenTransform(Transform):
    """Each sample with the columns ``replaced(sample)``; its state is that of its source."""

    iterator = _TokenIterator
    carries = False
    keeps = False

    @abstractmethod
    def replaced(self, sample: dict[str, Any]) -> Columns: ...
