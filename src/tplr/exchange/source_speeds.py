"""Ranks several buckets with the same objects by measured download speed, fastest first.

A source that was never tried comes first; a source that failed or never had an object comes last. In every
``EXPLORE``-th fetch the source with the oldest measurement comes first, so that a source that became faster is found.
Every object is verified by its hash, so a wrong order costs only time.
"""

from collections.abc import Iterable

from tplr.storage import ObjectStore

EXPLORE = 16
SMOOTHING = 0.5  # weight of the newest measurement


class SourceSpeeds:
    """Measured speeds of buckets in bytes per second, by their name."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._measured: dict[str, int] = {}  # number of the fetch
        self._fetches = 0

    def order(self, stores: Iterable[ObjectStore]) -> list[ObjectStore]:
        """Return the stores in the order in which to ask them; equal ones keep their order."""
        self._fetches += 1
        ranked = sorted(stores, key=lambda store: -self._speeds.get(store.name, float("inf")))
        if self._fetches % EXPLORE == 0 and ranked:
            oldest = min(ranked, key=lambda store: self._measured.get(store.name, -1))
            ranked = [oldest, *(store for store in ranked if store is not oldest)]
        return ranked

    def note_absent(self, store: ObjectStore) -> None:
        """Record that a bucket lacks the object, so that a bucket without objects is not asked first every time."""
        self._speeds[store.name] = SMOOTHING * self._speeds.get(store.name, 0.0)
        self._measured[store.name] = self._fetches

    def note(self, store: ObjectStore, *, size: int, seconds: float) -> None:
        """Record a fetch of ``size`` bytes; 0 if it failed."""
        speed = size / max(seconds, 1e-6)
        known = self._speeds.get(store.name, 0.0)
        self._speeds[store.name] = speed if not (known and size) else known + SMOOTHING * (speed - known)
        self._measured[store.name] = self._fetches
