"""shuffle: draws samples at random from a buffer."""

import random
from collections.abc import Iterator
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np

from tplr.sharding import Share
from tplr.streams.iterator import State, StreamIterator, Transform, divided_items
from tplr.streams.state import PLAIN, StateReader, check_sample
from tplr.streams.transforms.tokens import NarrowColumns, with_tensors

_CHECK_EVERY = 16
_RANDOM_COST = 5000  # copying the state of random.Random takes longer than this many values of a list


class _ShuffleIterator(StreamIterator[Any]):
    def __init__(self, transform: "Shuffle", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._size = transform.buffer_size
        self._random = random.Random(transform.seed)
        self._buffer: list[Any] = []
        self._narrow: NarrowColumns | None = None
        self.arrays_for_tensors = source.arrays_for_tensors
        if source.arrays_for_tensors:
            source.use_arrays()
            self._narrow = NarrowColumns()
        if saved:
            self._buffer = saved.items("buffer", kind=dict if self._narrow else object)
            if self._narrow:
                self._buffer = [*map(self._narrow.narrow, self._buffer)]
        if saved and saved.any("random") is not None:
            version, gauss, words = saved.items("random", length=3)
            try:
                self._random.setstate((version, tuple(words.tolist()), gauss))
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                raise saved.wrong("random", f"the state of a random generator ({error})") from error

    def items(self) -> Iterator[Any]:
        if self._narrow is None:
            return self._drawn(self.source.items())
        drawn = map(self._narrow.widen, self._drawn(map(self._narrow.narrow, self.source.items())))
        return drawn if self.arrays else map(with_tensors, drawn)

    def _drawn(self, samples: Iterator[Any]) -> Iterator[Any]:
        buffer, size, random_bits = self._buffer, self._size, self._random.getrandbits
        bits, last = size.bit_length(), size - 1
        checked = -(-size // _CHECK_EVERY)  # indices with which a sample is checked; checking all takes a tenth longer
        # Values that need no check. Token arrays come from transforms that check them.
        plain = PLAIN | {np.ndarray} if self._narrow else PLAIN
        for sample in islice(samples, max(0, last - len(buffer))):
            check_sample(sample, "shuffle", plain)
            buffer.append(sample)
        for sample in samples:
            # Equal to ``randrange(size)``, which takes longer than all the rest; the sample is the buffer's last one.
            while (index := random_bits(bits)) >= size:
                pass
            if index < checked:
                check_sample(sample, "shuffle", plain)
            if index < last:
                buffer[index], sample = sample, buffer[index]  # noqa: PLW2901
            yield sample
        while buffer:
            index = self._random.randrange(len(buffer))
            buffer[index], buffer[-1] = buffer[-1], buffer[index]
            yield buffer.pop()

    def state(self) -> State:
        version, words, gauss = self._random.getstate()
        random_state = [version, gauss, np.array(words, np.uint32)]
        if self._narrow:
            self._narrow.unify(self._buffer)
        return {"source": self.source.state(), "buffer": list(self._buffer), "random": random_state}

    def copied_values(self) -> int:
        return len(self._buffer) + _RANDOM_COST + super().copied_values()


class Shuffle(Transform):
    """Fills a buffer of ``buffer_size`` samples, and returns a sample drawn by ``random.Random(seed)``; the buffer's
    last sample replaces it. The state holds the buffer, so no sample is lost or read twice.

    Raises, when a sample is read:
        StateError: a state can't store it. Every sample of the first buffer is checked, and about every 16th later one;
            a state refuses those that were not. The next call continues after the sample.
    """

    iterator = _ShuffleIterator

    def __init__(self, source: Transform, buffer_size: int, seed: int) -> None:
        if not isinstance(buffer_size, Integral) or buffer_size < 1:
            raise ValueError(f"shuffle: expected a whole buffer_size above 0, got {buffer_size}")
        self.sources = (source,)
        self.buffer_size, self.seed = buffer_size, seed

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        random_state = saved[share.index % len(saved)].any("random") if saved else None
        return {"buffer": divided_items(saved, "buffer", share), "random": random_state}

    def describe(self, *, pinned: bool) -> str:
        return f"shuffle({self.buffer_size}, {self.seed})"
