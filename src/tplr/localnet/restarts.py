"""Starts nodes again that ended because something outside them was down, as a service manager does."""

import time
from collections import Counter

from tplr.localnet.process import Child
from tplr.logging import logger
from tplr.node.checks import OUTSIDE_DOWN

# A service manager tries without end; here the storage and the chain are on this machine, and soon up if ever.
MOST, PAUSE_SECONDS = 3, 5.0


class Restarts:
    """Decides about nodes that end by themselves; each is started again at most ``MOST`` times."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._due: dict[str, float] = {}  # by name; of ``time.monotonic``

    def check(self, child: Child) -> None:
        """Call it now and then. After exit status 3, starts the process again when ``PAUSE_SECONDS`` have passed.

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
                "%s ended with status %d, something outside is down (%s): starting it again in %g s (%d of %d)",
                *(name, OUTSIDE_DOWN, child.log, PAUSE_SECONDS, self._counts[name], MOST),
            )
