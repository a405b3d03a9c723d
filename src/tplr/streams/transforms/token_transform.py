"""What pad and add_bos_eos share: token columns of each sample are replaced, and no state is kept."""

from abc import abstractmethod
from typing import Any

from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.transforms.tokens import Columns, tensors


class TokenTransform(Transform):
    """Each sample with the columns ``replaced(sample)``; its state is that of its source."""

    carries = False

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _TokenIterator(self, self.sources[0].open(context, state))

    @abstractmethod
    def replaced(self, sample: dict[str, Any]) -> Columns: ...


class _TokenIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: TokenTransform, source: StreamIterator[Any]) -> None:
        super().__init__(source)
        self._transform = transform
        self.arrays_for_tensors = source.arrays_for_tensors

    def __next__(self) -> dict[str, Any]:
        sample = self.source.__next__()
        return sample | tensors(self._transform.replaced(sample))

    def raw(self) -> dict[str, Any]:
        sample = self.source.raw()
        return sample | self._transform.replaced(sample)

    def state(self) -> State:
        return self.source.state()
