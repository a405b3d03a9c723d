"""from_sequence and from_order: samples by index, so a state is one number."""

from collections.abc import Iterator, Sequence
from typing import Any

from tplr.streams.epoch_shuffle import EpochShuffle
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.order import Order, OrderIterator


class FromOrder(Transform):
    """Items of an order. Its state fits other numbers of ranks, as ``Order.share`` says."""

    def __init__(self, order: Order[Any]) -> None:
        self.order = order

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return OrderIterator(self.order, state)

    def describe(self, *, pinned: bool) -> str:
        if pinned and self.order.shared is not None:
            return f"{self.order.name}{list(self.order.shared)}"
        return self.order.name


class FromSequence(Transform):
    """Items of anything with ``len`` and ``[i]``, for one epoch or without end; ``EpochShuffle`` orders an epoch."""

    def __init__(self, sequence: Sequence[Any], repeat: bool, shuffle: bool, seed: int) -> None:
        if not len(sequence) and repeat:
            raise ValueError("from_sequence: an empty sequence can't be repeated")
        self.sequence, self.repeat, self.shuffle, self.seed = sequence, repeat, shuffle, seed

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _SequenceIterator(self, state)

    def describe(self, *, pinned: bool) -> str:
        how = f"{', repeat' if self.repeat else ''}{f', shuffle({self.seed})' if self.shuffle else ''}"
        return f"from_sequence({len(self.sequence)}{how})"


class _SequenceIterator(StreamIterator[Any]):
    def __init__(self, transform: FromSequence, state: State | None) -> None:
        super().__init__()
        self._transform = transform
        self._index: int = state["index"] if state else 0  # over all epochs
        self._length = len(transform.sequence)
        self._shuffle = EpochShuffle(self._length, transform.seed if transform.shuffle else None)

    def items(self) -> Iterator[Any]:
        sequence, repeat = self._transform.sequence, self._transform.repeat
        while self._length:
            epoch, place = divmod(self._index, self._length)
            if epoch and not repeat:
                return
            for index in self._shuffle.order(epoch)[place:]:
                item = sequence[index]
                self._index += 1
                yield item

    def state(self) -> State:
        return {"index": self._index}
