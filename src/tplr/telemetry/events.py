"""One stream of events per node; ``docs/architecture.md`` lists the fields of each kind."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

Event = Mapping[str, Any]
# Fields that identify the node and window of an event; all others are its content.
HEADER = frozenset({"event", "time", "role", "uid", "window"})
# Events with the content of score reports, which others may read only after the weights are in force, so not public.
SEALED = frozenset({"scores", "evaluated"})
# Reasons of the event ``missed``: why a miner has no valid update for a window.
Cause = Literal["behind", "chain", "data", "storage", "training", "no_batch", "late"]
Listener = Callable[[Event], None]


class Telemetry:
    """Passes each event to every listener, with the node's role, its uid and the time.

    Values are of JSON types. Listeners must not block or raise.
    """

    def __init__(self, *, role: str, uid: int, listeners: tuple[Listener, ...] = ()) -> None:
        self._fields = {"role": role, "uid": uid}
        self._listeners = listeners

    def emit(self, event: str, **fields: Any) -> None:
        """Pass ``event`` to the listeners."""
        record = {"event": event, "time": time.time(), **self._fields, **fields}
        for listener in self._listeners:
            listener(record)
