"""Converts scores to the weights that a validator sets on chain."""

from collections.abc import Mapping


def power_normalise(scores: Mapping[int, float], power: float) -> dict[int, float]:
    """Return ``max(0, score)**power / sum``, by ascending uid and without zeros; empty if no score is positive."""
    raised = {uid: scores[uid] ** power for uid in sorted(scores) if scores[uid] > 0}
    total = sum(raised.values())
    return {uid: value / total for uid, value in raised.items() if value > 0}
