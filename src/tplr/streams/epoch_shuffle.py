"""Orders an epoch with ``random.Random``, as the documented interface of from_files and from_sequence requires."""

import random
from collections.abc import Sequence


class EpochShuffle:
    """Shuffles one list of ``length`` indices again for each epoch, with one ``random.Random(seed)``.

    The order of an epoch costs a shuffle for every epoch up to it. ``tplr.permutation`` has no such cost, but other
    orders.

    Args:
        seed: None keeps every epoch in index order.
    """

    def __init__(self, length: int, seed: int | None) -> None:
        self._indices = range(length) if seed is None else [*range(length)]
        self._random = random.Random(seed)
        self._shuffled = -1  # epoch of the current order

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of an epoch, valid until the next call. Epochs must not decrease from call to call."""
        while isinstance(self._indices, list) and self._shuffled < epoch:
            self._random.shuffle(self._indices)
            self._shuffled += 1
        return self._indices
