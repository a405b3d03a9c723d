"""shuffle: draws samples at random from a buffer."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from tplr.streams.iterator import State, StreamIterator, Transform


class _ShuffleIterator(StreamIterator[Any]):
    def __init__(self, transform: "Shuffle", source: StreamIterator[Any], state: State | None) -> None:
        super().__init__(source)
        self._size = transform.buffer_size
        self._random = random.Random(transform.seed)
        self._buffer: list[Any] = []
        if state:
            self._buffer = list(state["buffer"])
            version, gauss, words = state["random"]
            self._random.setstate((version, tuple(words.tolist()), gauss))

    def items(self) -> Iterator[Any]:
        buffer, size, random_bits = self._buffer, self._size, self._random.getrandbits
        bits, last = size.bit_length(), size - 1
        for sample in self.source.items():
            if len(buffer) < last:
                buffer.append(sample)
                continue
            # As ``randrange(size)``, the sample being the buffer's last: that method takes longer than all the rest.
            while (index := random_bits(bits)) >= size:
                pass
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
        return {"source": self.source.state(), "buffer": list(self._buffer), "random": random_state}


class Shuffle(Transform):
    """Fills a buffer of ``buffer_size`` samples and returns one drawn by ``random.Random(seed)``; the buffer's last
    sample takes its place. The state holds the buffer, so no sample is lost or read twice."""

    iterator = _ShuffleIterator

    def __init__(self, source: Transform, buffer_size: int, seed: int) -> None:
        if buffer_size < 1:
            raise ValueError(f"shuffle: expected a buffer_size above 0, got {buffer_size}")
        self.sources = (source,)
        self.buffer_size, self.seed = buffer_size, seed

    def describe(self, *, pinned: bool) -> str:
        return f"shuffle({self.buffer_size}, {self.seed})"
