"""Ranks several sources of the same objects by measured download speed, fastest first.

A source that was never tried comes first; a source that failed or never had an object comes last. In every
``EXPLORE``-th fetch the source with the oldest measurement comes first, so that a source that became faster is found.
Every object is verified by its hash, so a wrong order costs only time.

A source is a bucket of one owner, and is named by its owner: anybody can commit the name of another's bucket.
"""

from collections.abc import Collection, Iterable

EXPLORE = 16
SMOOTHING = 0.5  # weight of the newest measurement
# A source is given up if another one has been this many times as fast.
TOO_SLOW = 4


class SourceSpeeds:
    """Measured speeds of sources in bytes per second, by their names."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._measured: dict[str, int] = {}  # number of the fetch
        self._fetches = 0

    def order(self, sources: Collection[str]) -> list[str]:
        """Return the sources in the order in which to ask them; equal ones keep their order."""
        self._fetches += 1
        ranked = sorted(sources, key=lambda source: -self._speeds.get(source, float("inf")))
        if self._fetches % EXPLORE == 0 and ranked:
            oldest = min(ranked, key=lambda source: self._measured.get(source, -1))
            ranked = [oldest, *(source for source in ranked if source != oldest)]
        return ranked

    def expected(self, others: Iterable[str]) -> float:
        """Return the speed below which a source is too slow while ``others`` can still be asked; 0 if none is known."""
        return max((self._speeds.get(source, 0.0) for source in others), default=0.0) / TOO_SLOW

    def note_absent(self, source: str) -> None:
        """Record that a source lacks the object, so that one without objects is not asked first every time."""
        self._speeds[source] = SMOOTHING * self._speeds.get(source, 0.0)
        self._measured[source] = self._fetches

    def note(self, source: str, *, size: int, seconds: float) -> None:
        """Record a fetch of ``size`` bytes; 0 if it failed."""
        speed = size / max(seconds, 1e-6)
        known = self._speeds.get(source, 0.0)
        self._speeds[source] = speed if not (known and size) else known + SMOOTHING * (speed - known)
        self._measured[source] = self._fetches
