"""Progress of long transfers in the log."""

import time
from collections.abc import Callable

from tplr.logging import logger

# ``(bytes done, bytes in all)``, called on the event loop.
Progress = Callable[[int, int], None]

SECONDS_BETWEEN = 10.0


def log_progress(name: str, *, now: Callable[[], float] = time.monotonic) -> Progress:
    """A progress callback that logs at most every ``SECONDS_BETWEEN``; shorter transfers log nothing."""
    began = told = now()

    def progress(done: int, total: int) -> None:
        nonlocal told
        if now() - told >= SECONDS_BETWEEN:
            told = now()
            speed = done / 1e6 / (told - began)
            logger.info("%s: %d of %d MB, %.1f MB/s", name, done // 10**6, total // 10**6, speed)

    return progress
