"""Whose turn it is when several sources are mixed by weight: the largest credit wins."""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from math import gcd


class WeightedRoundRobin:
    """A schedule without randomness. Before each turn every source earns its weight; the one with the largest credit
    has the turn (of several, the first) and pays the sum of all weights.

    Weights are the decimals they are written as, so sums are exact, and after ``period`` turns all begins again:
    ``[0.5, 0.3, 0.2]`` has a period of 10.

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
        """Index of the source whose turn it is."""
        held = [credit + weight for credit, weight in zip(self.held, self._weights, strict=True)]
        # A source without weight has no credit either, and never a turn: some other one holds more than 0.
        index = held.index(max(held))
        held[index] -= self.period
        self.held = held
        return index
