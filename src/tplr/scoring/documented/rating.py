"""Computes ratings from rankings: the Plackett–Luce model with Bayesian updates, as in OpenSkill.

Weng, Lin, "A Bayesian Approximation Method for Online Ranking", JMLR 12 (2011), algorithm 4, with one player per team.
``math.fsum`` rounds exact sums, so the result does not depend on the order of the players. The library sums in the
order of its arguments.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

MU, SIGMA = 25.0, 25.0 / 3.0
# Smallest share of a variance that remains after a match.
KAPPA = 1e-4


class Rating(NamedTuple):
    """A belief about skill: mean and standard deviation."""

    mu: float = MU
    sigma: float = SIGMA

    @property
    def ordinal(self) -> float:
        """Conservative skill: ``mu - 3 * sigma``."""
        return self.mu - 3 * self.sigma


def rate(ratings: Mapping[int, Rating], scores: Mapping[int, float], *, beta: float, tau: float) -> dict[int, Rating]:
    """Return the ratings after one match; with fewer than two players they do not change.

    Args:
        scores: the players' scores, higher is better; equal scores share a rank.
        beta: standard deviation of one performance.
        tau: growth of a player's deviation before the match: ``sigma**2 + tau**2``.
    """
    if len(scores) < 2:
        return {player: ratings[player] for player in scores}
    variance = {player: ratings[player].sigma ** 2 + tau**2 for player in scores}
    c = math.sqrt(math.fsum(value + beta**2 for value in variance.values()))
    strength = {player: math.exp(ratings[player].mu / c) for player in scores}
    # For each score: total strength of the players with at most this score, and the number of players with it.
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
                # Players that share a rank each count with an equal part, so the rank counts once.
                omega.append(-chance)
                delta.append(chance * (1 - chance))
        gain = variance[player] / c * math.fsum(omega)
        loss = (variance[player] / c**2) * (math.sqrt(variance[player]) / c) * math.fsum(delta)
        result[player] = Rating(
            mu=ratings[player].mu + gain,
            sigma=math.sqrt(variance[player] * max(1 - loss, KAPPA)),
        )
    return result
