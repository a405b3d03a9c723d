"""Deterministic weighted round-robin over sources; ``Order.mix`` and ``interleave_datasets`` follow it."""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from math import gcd


class WeightedRoundRobin:
    """Before each turn every source earns its weight as credit. The source with the largest credit (the first one in a
    tie) gets the turn and pays the sum of all weights.

    Weights are exact decimals as written, so the schedule repeats after ``period`` turns: ``[0.5, 0.3, 0.2]`` has a
    period of 10.

    Attributes:
        held: credit of each source; this is the whole state.

    Raises:
        ValueError: a weight is negative, not finite, or all are zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        try:
            exact = [Fraction(repr(float(weight))) for weight in weights]
        except ValueError:
            exact = []
        if not exact or min(exact) < 0 or not sum(exact):
            raise ValueError(f"weights: expected numbers of 0 or more, one above 0, got {list(weights)}")
        scale = reduce(lambda a, b: a * b // gcd(a, b), (weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        shared = gcd(*whole)
        self._weights = [weight // shared for weight in whole]
        self.period = sum(self._weights)
        self.held = [0] * len(whole)

    def next(self) -> int:
        """Return the index of the source that gets the next turn."""
        held = [credit + weight for credit, weight in zip(self.held, self._weights, strict=True)]
        # A source of weight 0 never has the turn: its credit is 0, and another one is above 0.
        index = held.index(max(held))
        held[index] -= self.period
        self.held = held
        return index
