"""Failpoints: named steps of a window at which a test or ``localnet --chaos`` ends a node; no-ops in production."""

import os
import signal
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Literal, get_args

FailpointName = Literal[
    # miner
    "data_loaded",
    "trained",
    "packed",
    "committed",
    "uploaded",
    # miner and validator
    "gathered",
    "applied",
    "reported",
    "saved",
    "publishing",
    "published",
    # validator
    "observed",
    "sealed",
    "scored",
    # aggregator
    "found",
    "kept",
    "included",
    "aggregated",
]
FAILPOINTS: tuple[FailpointName, ...] = get_args(FailpointName)

# Awaited at every failpoint of the current task; set by tests and by ``KillAt``.
hook: ContextVar[Callable[[FailpointName], Awaitable[None]] | None] = ContextVar("hook", default=None)


class KillAt:
    """A hook that kills this process when it passes one failpoint for the given time, as ``packed:3``."""

    def __init__(self, text: str) -> None:
        self.name, _, count = text.partition(":")
        self.left = int(count or 1)

    async def __call__(self, name: FailpointName) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def failpoint(name: FailpointName) -> None:
    """Mark that this node has just completed the step ``name``."""
    if call := hook.get():
        await call(name)
