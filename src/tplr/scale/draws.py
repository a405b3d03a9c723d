"""Deterministic random streams of a simulation.

A stream is NumPy's PCG64 with the seed ``derive("scale", seed, *names)``. Each purpose, such as uploads in one window,
has its own stream, so a change of one part of a simulation changes no random number of another part.
"""

from __future__ import annotations

import numpy as np

from tplr.seeds import derive


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the random stream for a purpose, such as ``stream(seed, "upload", window)``."""
    return np.random.Generator(np.random.PCG64(derive("scale", seed, *names)))


def log_normal(rng: np.random.Generator, median: float, spread: float, size: int) -> np.ndarray:
    """Return ``size`` positive numbers: ``median * exp(spread * normal)``."""
    return median * np.exp(spread * rng.standard_normal(size))
