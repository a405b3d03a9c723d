"""Simulates a network in one process, with real training, the real validator, and simulated time.

Miners write into in-memory buckets, with time stamps of their choice. The nodes' own code then gathers, observes,
scores and applies each window. Chain and dataset are simulated: block hashes follow from a seed, and pages are pieces
of Python's standard library.
"""

from tplr.localnet.simulation.member import Member
from tplr.localnet.simulation.settings import (
    SINGLE_BYTES,
    START_WINDOW,
    VALIDATOR,
    VOCABULARY,
    WINDOW_SECONDS,
    new_signer,
    profile,
    small,
)
from tplr.localnet.simulation.world import WindowRecord, World

__all__ = [
    "SINGLE_BYTES",
    "START_WINDOW",
    "VALIDATOR",
    "VOCABULARY",
    "WINDOW_SECONDS",
    "Member",
    "WindowRecord",
    "World",
    "new_signer",
    "profile",
    "small",
]
