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
    "scored",
    # aggregator
    "found",
    "kept",
    "included",
    "aggregated",
]
FAILPOINTS: tuple[FailpointName, ...] = get_args(FailpointName)
KILL_AT = "TPLR_LOCALNET_KILL_AT"  # "packed:3" kills the process when it passes ``packed`` for the third time

# Awaited at every failpoint of the current task; set by tests.
hook: ContextVar[Callable[[FailpointName], Awaitable[None]] | None] = ContextVar("hook", default=None)


class _KillAt:
    """Kills this process when it passes one failpoint for the given time."""

    def __init__(self, text: str) -> None:
        self.name, _, count = text.partition(":")
        self.left = int(count or 1)

    def passed(self, name: FailpointName) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


_kill_at = _KillAt(os.environ[KILL_AT]) if KILL_AT in os.environ else None


async def failpoint(name: FailpointName) -> None:
    """Mark that this node has just done ``name``."""
    if _kill_at:
        _kill_at.passed(name)
    if call := hook.get():
        await call(name)
