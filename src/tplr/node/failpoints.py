"""The named steps of a window: a localnet in chaos, or a test, ends a node right there; production does nothing."""

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
    "looked",
    "scored",
    # aggregator
    "found",
    "kept",
    "included",
    "aggregated",
]
FAILPOINTS: tuple[FailpointName, ...] = get_args(FailpointName)
KILL_AT = "TPLR_LOCALNET_KILL_AT"  # "packed:3" ends the process when it has packed for the third time

watcher: ContextVar[Callable[[FailpointName], Awaitable[None]] | None] = ContextVar("watcher", default=None)


class _Failpoint:
    """Where this process is to end, as its environment says."""

    def __init__(self, text: str) -> None:
        self.step, _, count = text.partition(":")
        self.left = int(count or 1)

    def burn(self, step: FailpointName) -> None:
        if step == self.step:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


_fuse = _Failpoint(os.environ[KILL_AT]) if KILL_AT in os.environ else None


async def failpoint(step: FailpointName) -> None:
    """This node has just done ``step``."""
    if _fuse:
        _fuse.burn(step)
    if watch := watcher.get():
        await watch(step)
