"""Events as lines of the node's log."""

import logging
from typing import Any

from tplr.logging import logger
from tplr.telemetry.events import Event

# Their emitters log them in words of their own.
SPOKEN = frozenset({"missed", "problem", "peers", "weights"})
# One line a miner: for who looks closer.
DETAILS = frozenset({"evaluated"})
HEADER = frozenset({"event", "time", "role", "uid", "window"})


def log_event(event: Event) -> None:
    """Write ``event`` as ``kind: field value, field value``; who and when stand in every line anyway."""
    kind = event["event"]
    if kind not in SPOKEN:
        fields = ", ".join(f"{name} {_short(value)}" for name, value in event.items() if name not in HEADER)
        level = logging.DEBUG if kind in DETAILS else logging.INFO
        logger.log(level, "%s: %s" if fields else "%s%s", kind, fields)


def _short(value: Any) -> str:
    match value:
        case float():
            return f"{value:.4g}"
        case str() if len(value) == 64:  # a hash
            return f"{value[:12]}…"
        case dict():
            return "{" + ", ".join(f"{name}: {_short(one)}" for name, one in value.items()) + "}"
        case _:
            return str(value)
