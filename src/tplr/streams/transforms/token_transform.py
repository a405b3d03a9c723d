"""What pad and add_bos_eos share: token columns of each sample are replaced, and no state is kept."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from tplr.streams.iterator import PassingIterator, PipelineContext, State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Columns, tensors


class TokenTransform(Transform):
    """Each sample with the columns ``replaced(sample)``; its state is that of its source."""

    carries = False

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _TokenIterator(self, self.sources[0].open(context, state))

    @abstractmethod
    def replaced(self, sample: dict[str, Any]) -> Columns: ...


class _TokenIterator(PassingIterator[dict[str, Any]]):
    def __init__(self, transform: TokenTransform, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self._transform = transform

    def items(self) -> Iterator[dict[str, Any]]:
        replaced, arrays = self._transform.replaced, self.arrays
        for sample in self.source.items():
            yield sample | (replaced(sample) if arrays else tensors(replaced(sample)))

    def state(self) -> State:
        return self.source.state()
