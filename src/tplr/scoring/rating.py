"""Ratings from rankings: the Plackett–Luce model with Bayesian updates, as OpenSkill computes them.

Weng, Lin, "A Bayesian Approximation Method for Online Ranking", JMLR 12 (2011), algorithm 4, for teams of one. Sums
are exact before they are rounded (``math.fsum``), so the order in which miners are given changes no bit: that is why
these lines are here instead of the library, whose sums run in the order of its arguments.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

MU, SIGMA = 25.0, 25.0 / 3.0
# The least part of a variance that is left after one match.
KAPPA = 1e-4


class Rating(NamedTuple):
    """A belief about skill: mean and standard deviation."""

    mu: float = MU
    sigma: float = SIGMA

    @property
    def ordinal(self) -> float:
        """Skill that is almost surely there: mu - 3 sigma."""
        return self.mu - 3 * self.sigma


def rate(ratings: Mapping[int, Rating], scores: Mapping[int, float], *, beta: float, tau: float) -> dict[int, Rating]:
    """Ratings after one match; fewer than two players play none, and keep theirs.

    Args:
        scores: by player, the higher the better; equal ones share a rank. Only who stands here plays.
        beta: how much a result says of skill: the standard deviation of one performance.
        tau: by how much a player's deviation grows before the match.
    """
    if len(scores) < 2:
        return {player: ratings[player] for player in scores}
    variance = {player: ratings[player].sigma ** 2 + tau**2 for player in scores}
    c = math.sqrt(math.fsum(value + beta**2 for value in variance.values()))
    strength = {player: math.exp(ratings[player].mu / c) for player in scores}
    # Of each rank: all that ranked there or below, and how many share it.
    below = {
        score: math.fsum(strength[player] for player in scores if scores[player] <= score)
        for score in set(scores.values())
    }
    shared = {score: sum(other == score for other in scores.values()) for score in below}
    result = {}
    for player, score in scores.items():
        omega, delta = [1 / shared[score]], []
        for other, total in below.items():
            if other >= score:
                chance = strength[player] / total
                # Each of those who share a rank counts with its part of it: together, once.
                omega.append(-chance)
                delta.append(chance * (1 - chance))
        gain = variance[player] / c * math.fsum(omega)
        loss = (variance[player] / c**2) * (math.sqrt(variance[player]) / c) * math.fsum(delta)
        result[player] = Rating(
            mu=ratings[player].mu + gain,
            sigma=math.sqrt(variance[player] * max(1 - loss, KAPPA)),
        )
    return result
