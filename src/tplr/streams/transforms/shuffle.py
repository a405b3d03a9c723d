"""shuffle: draws samples at random from a buffer."""

import random
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

    def __next__(self) -> Any:
        buffer = self._buffer
        while len(buffer) < self._size:
            try:
                buffer.append(next(self.source))
            except StopIteration:
                break
        if not buffer:
            raise StopIteration
        index = self._random.randrange(len(buffer))
        buffer[index], buffer[-1] = buffer[-1], buffer[index]
        return buffer.pop()

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
