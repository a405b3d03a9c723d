"""A run of two miners and a validator as events, and views made from them."""

from collections.abc import Iterable
from typing import Any

import pytest

from tplr.watch.view import NetworkView

ROLES = {"validator": "validator", "miner-1": "miner", "miner-2": "miner"}


class Recording:
    """A run of two miners and a validator, recorded window by window; tests damage it where needed."""

    start = 7

    def __init__(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {name: [] for name in ROLES}
        for uid, name in enumerate(ROLES):
            self.emit(name, "started", uid=uid, version="1", window=5)

    def emit(self, name: str, event: str, **fields: Any) -> None:
        uid = list(ROLES).index(name)
        self.events[name].append({"event": event, "time": 1.0, "role": ROLES[name], "uid": uid, **fields})

    def window(self, number: int, *, skip: Iterable[str] = (), fingerprints: dict[str, str] | None = None) -> None:
        """Record the ``number``-th window of the run, from 1; ``skip`` names nodes that did not see it."""
        window = self.start + number - 1
        for name in [name for name in ROLES if name not in skip]:
            if name == "validator":
                self.emit(name, "baseline", window=window, held_out_loss=8.0 - 0.2 * number)
                self.emit(name, "scores", window=window, scores={"1": 0.01 * number, "2": 0.02})
            else:
                loss = 8.1 - 0.2 * number
                self.emit(name, "trained", window=window, loss=loss, batches=3, of_batches=4, tokens=384, seconds=1.5)
                self.emit(name, "uploaded", window=window, bytes=30_000, parameters=120_000)
            self.applied(name, window, (fingerprints or {}).get(name, f"{window:064x}"))
        self.emit("validator", "weights", block=16 * window, weights={"1": 0.25, "2": 0.75})

    def applied(self, name: str, window: int, fingerprint: str, digest: str = "d" * 64) -> None:
        fields = {"included": [1, 2], "skipped": {}, "bytes": 60_000, "fingerprint": fingerprint, "digest": digest}
        self.emit(name, "applied", window=window, seconds=0.1, **fields)

    def view(self) -> NetworkView:
        view = NetworkView(ROLES)
        for name, events in self.events.items():
            view.update(name, events)
        return view


@pytest.fixture
def recording():
    return Recording()


@pytest.fixture
def run(recording):
    """A run of ten windows without problems."""
    for number in range(1, 11):
        recording.window(number)
    return recording
