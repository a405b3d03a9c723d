"""Logs events as lines of the node's log."""

import logging
from typing import Any

from tplr.logging import logger
from tplr.telemetry.events import HEADER, Event

# Events that their emitters log themselves.
LOGGED_BY_EMITTER = frozenset({"missed", "problem", "peers", "weights", "outdated", "evaluation"})
# Events with one line per miner, or only for programs: logged at level DEBUG.
DETAILS = frozenset({"evaluated", "pulse"})


def log_event(event: Event) -> None:
    """Write ``event`` as ``kind: field value, field value``; each log line shows node and time anyway."""
    kind = event["event"]
    if kind not in LOGGED_BY_EMITTER:
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
