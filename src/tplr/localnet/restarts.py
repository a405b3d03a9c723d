"""Restarts nodes that ended because an outside service was down, like a service manager."""

import time
from collections import Counter

from tplr.localnet.process import Child
from tplr.logging import logger
from tplr.node.checks import OUTSIDE_DOWN

# A service manager retries without limit. Here storage and chain are on this machine, so they return soon or never.
MOST, PAUSE_SECONDS = 3, 5.0


class Restarts:
    """Decides about nodes that end by themselves; restarts each at most ``MOST`` times."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._due: dict[str, float] = {}  # by name; of ``time.monotonic``

    def check(self, child: Child) -> None:
        """Restart a process ``PAUSE_SECONDS`` after it ended with exit status 3. Call this regularly.

        Raises:
            LocalnetError: it ended with another status, or too often with this one.
        """
        name = child.name
        if child.died != OUTSIDE_DOWN:
            self._due.pop(name, None)
            child.check()
        elif name in self._due:
            if time.monotonic() >= self._due[name]:
                del self._due[name]
                child.start()
        elif self._counts[name] == MOST:
            child.check()
        else:
            self._counts[name] += 1
            self._due[name] = time.monotonic() + PAUSE_SECONDS
            logger.warning(
                "%s ended with status %d, an external service is down (%s): starting it again in %g s (%d of %d)",
                *(name, OUTSIDE_DOWN, child.log, PAUSE_SECONDS, self._counts[name], MOST),
            )
