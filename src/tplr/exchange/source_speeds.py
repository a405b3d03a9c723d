"""Which of several buckets with the same objects is read first: the one that was the fastest.

A source that was never tried comes first, one that failed or has never had an object comes last. In every
``EXPLORE``-th fetch the source whose measurement is the oldest comes first, so that nobody stays slow for ever.
Whatever comes from a source is verified by its hash, so a wrong order costs time and nothing else.
"""

from collections.abc import Iterable

from tplr.storage import ObjectStore

EXPLORE = 16
SMOOTHING = 0.5  # weight of the newest measurement


class SourceSpeeds:
    """Measured bytes per second of buckets, by their name."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._measured: dict[str, int] = {}  # number of the fetch
        self._fetches = 0

    def order(self, stores: Iterable[ObjectStore]) -> list[ObjectStore]:
        """In the order in which to ask them; among equals as given."""
        self._fetches += 1
        ranked = sorted(stores, key=lambda store: -self._speeds.get(store.name, float("inf")))
        if self._fetches % EXPLORE == 0 and ranked:
            oldest = min(ranked, key=lambda store: self._measured.get(store.name, -1))
            ranked = [oldest, *(store for store in ranked if store is not oldest)]
        return ranked

    def note_absent(self, store: ObjectStore) -> None:
        """Record that a bucket lacks the object: who never has any is not asked first in each fetch."""
        self._speeds[store.name] = SMOOTHING * self._speeds.get(store.name, 0.0)
        self._measured[store.name] = self._fetches

    def note(self, store: ObjectStore, *, size: int, seconds: float) -> None:
        """Record a fetch of ``size`` bytes; 0: it failed."""
        speed = size / max(seconds, 1e-6)
        known = self._speeds.get(store.name, 0.0)
        self._speeds[store.name] = speed if not (known and size) else known + SMOOTHING * (speed - known)
        self._measured[store.name] = self._fetches
