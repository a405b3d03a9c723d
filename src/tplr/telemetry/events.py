"""One stream of events per node; the fields of each kind stand in ``docs/architecture.md``."""

import time
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]
Listener = Callable[[Event], None]


class Telemetry:
    """Hands each event to every listener, with the node's role, uid and the time in it.

    Values are JSON's own types. Listeners are quick and do not raise.
    """

    def __init__(self, *, role: str, uid: int, listeners: tuple[Listener, ...] = ()) -> None:
        self._fields = {"role": role, "uid": uid}
        self._listeners = listeners

    def emit(self, event: str, **fields: Any) -> None:
        """Hand ``event`` to the listeners."""
        record = {"event": event, "time": time.time(), **self._fields, **fields}
        for listener in self._listeners:
            listener(record)
