"""Failpoints: named steps of a window at which a test or ``localnet --chaos`` ends a node; no-ops in production."""

import os
import signal
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Literal, get_args

from tplr.config import KILL_AT
from tplr.errors import ConfigError

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
        """Raises ConfigError if ``text`` is not a failpoint and, optionally, a number from 1 on."""
        self.name, _, count = text.partition(":")
        if self.name not in FAILPOINTS or not (count or "1").isdecimal() or not int(count or 1):
            raise ConfigError(
                f"{KILL_AT} is {text!r}: expected one of {', '.join(FAILPOINTS)}, and how often, as packed:3"
            )
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
