"""Temporary stand-in of part C's own-pages test."""

from collections.abc import Sequence
from typing import Any

import numpy as np

THRESHOLD, FEWEST, FLOOR = 3.0, 4, 0.02


def indicator(uid: int, assigned_products: Sequence[float], alignment: Any) -> float | None:
    if uid not in alignment.uids or len(alignment.uids) <= FEWEST:
        return None
    at = alignment.uids.index(uid)
    a, b = np.array(assigned_products), np.array(alignment.products)
    others = np.arange(len(a)) != at
    useful = others & (np.abs(b) > 1e-3)
    r = float(np.median(a[useful] / b[useful])) if useful.any() else 1.0
    e = a - r * b
    spread = max(FLOOR, float(1.4826 * np.median(np.abs(e[others]))))
    return float(np.clip(e[at] / spread / THRESHOLD, -1, 1))
