"""How many requests it takes to wait for an object: by the rule of ``exchange/polling.py``, in closed form."""

from __future__ import annotations

import numpy as np

from tplr.exchange.polling import GROWTH


def count_looks(waited: np.ndarray | float, *, shortest: float, request: np.ndarray | float) -> np.ndarray:
    """Requests until an object is found that comes after ``waited`` seconds; the last one finds it.

    Args:
        shortest: pause at first, seconds.
        request: seconds of each.
    """
    turn = shortest / GROWTH
    early = np.clip(waited, 0.0, turn) / (shortest + request)
    late = np.log((GROWTH * np.maximum(waited, turn) + request) / (shortest + request)) / GROWTH
    return 1.0 + early + late
