"""Logs the progress of long transfers."""

import time
from collections.abc import Callable

from tplr.logging import logger

# ``(bytes done, total bytes)``, called on the event loop.
Progress = Callable[[int, int], None]

SECONDS_BETWEEN = 10.0


class ProgressLog:
    """A ``Progress`` that logs at most every ``SECONDS_BETWEEN``; shorter transfers log nothing."""

    def __init__(self, name: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = now
        self._began = self._told = now()

    def __call__(self, done: int, total: int) -> None:
        if self._now() - self._told >= SECONDS_BETWEEN:
            self._told = self._now()
            speed = done / 1e6 / (self._told - self._began)
            logger.info("%s: %d of %d MB, %.1f MB/s", self._name, done // 10**6, total // 10**6, speed)


class ByteCount:
    """Counts the bytes of a transfer of ``total``, and reports them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)
