"""Counts the requests that polling for an object takes: the rule of ``exchange/polling.py`` in closed form."""

from __future__ import annotations

import numpy as np

from tplr.exchange.polling import GROWTH


def count_polls(waited: np.ndarray | float, *, shortest: float, request: np.ndarray | float) -> np.ndarray:
    """Return the number of requests for an object that appears after ``waited`` seconds, with the one that finds it.

    Args:
        shortest: first pause, in seconds.
        request: duration of each request, in seconds.
    """
    turn = shortest / GROWTH
    early = np.clip(waited, 0.0, turn) / (shortest + request)
    late = np.log((GROWTH * np.maximum(waited, turn) + request) / (shortest + request)) / GROWTH
    return 1.0 + early + late
