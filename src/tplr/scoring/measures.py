"""What one evaluation says: losses before and after one miner's update, on its own pages and on random ones."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Mean losses in nats a token, of one model before and after one update was applied alone."""

    uid: int
    own_before: float
    own_after: float
    random_before: float
    random_after: float


def relative_improvement(before: float, after: float) -> float:
    """(before - after) / before; an update after which the loss is not finite loses everything."""
    return (before - after) / before if math.isfinite(after) else -1.0


def gradient_score(measured: Measurement) -> float:
    """Relative improvement on the random pages."""
    return relative_improvement(measured.random_before, measured.random_after)


def binary_indicator(measured: Measurement) -> int:
    """+1 if the update helps more on the miner's own pages than on random ones, else -1.

    A miner that did not train on the pages it was given has no reason to be better there.
    """
    own = relative_improvement(measured.own_before, measured.own_after)
    return 1 if own > gradient_score(measured) else -1
