"""Events of a node, for whoever listens: nothing that emits knows who does."""

from tplr.telemetry.events import Listener, Telemetry
from tplr.telemetry.jsonl import JsonlListener, read_events

__all__ = ["JsonlListener", "Listener", "Telemetry", "read_events"]
