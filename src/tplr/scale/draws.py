"""Every random number of a simulation, by a written rule.

A stream is NumPy's PCG64 with the seed ``derive("scale", seed, *names)``: of one participant, of one purpose in one
window. So a change of one part of a simulation changes no number of another part.
"""

from __future__ import annotations

import numpy as np

from tplr.seeds import derive


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The stream of a purpose, such as ``stream(seed, "upload", window)``."""
    return np.random.Generator(np.random.PCG64(derive("scale", seed, *names)))


def log_normal(rng: np.random.Generator, median: float, spread: float, size: int) -> np.ndarray:
    """``size`` positive numbers: ``median * exp(spread * normal)``."""
    return median * np.exp(spread * rng.standard_normal(size))
