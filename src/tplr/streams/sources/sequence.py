"""from_sequence and from_order: samples by index, so a state is one number."""

from collections.abc import Iterator, Sequence
from typing import Any

from tplr.sharding import Share
from tplr.streams.epoch_shuffle import EpochShuffle
from tplr.streams.iterator import Part, PipelineContext, State, StreamIterator, Transform
from tplr.streams.order import Order, OrderIterator
from tplr.streams.shared_places import ENDLESS, Former, SharedPlaces, divide_places


class FromOrder(Transform):
    """Items of an order. Its state fits other numbers of ranks, as described in ``Order.share``."""

    def __init__(self, order: Order[Any]) -> None:
        self.order = order
        self.divisible = order.shared is None  # an order is shared by itself or by shard_by_rank
        self._length = ENDLESS if order.length is None else order.length

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        saved = self.reader(state)
        if context.share is None:
            return OrderIterator(self.order, {"consumed": saved.integer("consumed")} if saved else None)
        places = SharedPlaces(self._length, context.share, False, "items", saved)
        return _SequenceIterator(self.order, places, EpochShuffle(self._length, None))

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        return divide_places(
            [Former(one.share, self.reader(one.state), one.ended) for one in parts], self._length, share
        )

    def describe(self, *, pinned: bool) -> str:
        if pinned and self.order.shared is not None:
            return f"{self.order.name}{list(self.order.shared)}"
        return self.order.name


class FromSequence(Transform):
    """Items of anything with ``len`` and ``[i]``, for one epoch or endlessly; ``EpochShuffle`` orders an epoch."""

    def __init__(self, sequence: Sequence[Any], repeat: bool, shuffle: bool, seed: int) -> None:
        if not len(sequence) and repeat:
            raise ValueError("from_sequence: an empty sequence can't be repeated")
        if shuffle and seed is None:  # it would mean no shuffle
            raise ValueError("from_sequence: shuffle=True needs a shuffle_seed, got None")
        self.sequence, self.repeat, self.shuffle, self.seed = sequence, repeat, shuffle, seed

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        length = len(self.sequence)
        share = context.share or Share(0, 1)
        places = SharedPlaces(length, share, self.repeat, "items", self.reader(state), shuffled=self.shuffle)
        return _SequenceIterator(self.sequence, places, EpochShuffle(length, self.seed if self.shuffle else None))

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        former = [Former(one.share, self.reader(one.state), one.ended) for one in parts]
        return divide_places(former, len(self.sequence), share, shuffled=self.shuffle)

    def describe(self, *, pinned: bool) -> str:
        how = f"{', repeat' if self.repeat else ''}{f', shuffle({self.seed})' if self.shuffle else ''}"
        return f"from_sequence({len(self.sequence)}{how})"


class _SequenceIterator(StreamIterator[Any]):
    def __init__(self, items: Any, places: SharedPlaces, shuffle: EpochShuffle) -> None:
        super().__init__()
        self._items, self._places, self._shuffle = items, places, shuffle
        self._order = shuffle.order(places.epoch)

    def items(self) -> Iterator[Any]:
        item_at, places = self._items.__getitem__, self._places
        while True:
            # Of a range each place is its own; ``map`` takes half the time of a loop.
            run = places.run if isinstance(self._order, range) else map(self._order.__getitem__, places.run)
            try:
                yield from map(item_at, run)
            except GeneratorExit:  # nobody asked for a further item
                raise
            except BaseException:
                places.put_back()
                raise
            if not places.advance():
                return
            self._order = self._shuffle.order(places.epoch)

    def state(self) -> State:
        return self._places.state()
