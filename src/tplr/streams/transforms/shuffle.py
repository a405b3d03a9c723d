"""shuffle: a buffer from which samples are drawn at random."""

import random
from typing import Any

import numpy as np

from tplr.streams.iterator import Flow, Run, State, Step


class Shuffle(Step):
    """Keeps ``buffer_size`` samples (or all that are left) and hands on one drawn by ``random.Random(seed)``; the last
    takes its place. The state holds the buffer, so nothing is lost or read twice."""

    def __init__(self, source: Step, buffer_size: int, seed: int) -> None:
        if buffer_size < 1:
            raise ValueError(f"shuffle: expected a buffer_size above 0, got {buffer_size}")
        self.sources = (source,)
        self.buffer_size, self.seed = buffer_size, seed

    def open(self, run: Run, state: State | None = None) -> Flow[Any]:
        return _ShuffleFlow(self, self.sources[0].open(run, state["source"] if state else None), state)

    def describe(self, *, pinned: bool) -> str:
        return f"shuffle({self.buffer_size}, {self.seed})"


class _ShuffleFlow(Flow[Any]):
    def __init__(self, step: Shuffle, source: Flow[Any], state: State | None) -> None:
        super().__init__()
        self.source = source
        self._size = step.buffer_size
        self._random = random.Random(step.seed)
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
