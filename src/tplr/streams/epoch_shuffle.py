"""The order of an epoch by ``random.Random``, as the documented interface of from_files and from_sequence has it."""

import random
from collections.abc import Sequence


class EpochShuffle:
    """One ``random.Random(seed)`` shuffles one list of ``length`` indices again for each epoch.

    The order of an epoch costs a shuffle for every epoch up to it. ``tplr.permutation`` costs nothing, but its orders
    are others.

    Args:
        seed: None leaves every epoch in the order of the indices.
    """

    def __init__(self, length: int, seed: int | None) -> None:
        self._indices = range(length) if seed is None else [*range(length)]
        self._random = random.Random(seed)
        self._shuffled = -1  # the epoch of the present order

    def order(self, epoch: int) -> Sequence[int]:
        """The order of an epoch, valid until the next call. Epochs must not descend from call to call."""
        while isinstance(self._indices, list) and self._shuffled < epoch:
            self._random.shuffle(self._indices)
            self._shuffled += 1
        return self._indices
