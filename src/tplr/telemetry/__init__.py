"""Events of a node, and listeners that receive them."""

from tplr.telemetry.events import Listener, Telemetry
from tplr.telemetry.jsonl import JsonlListener, read_events
from tplr.telemetry.log import log_event
from tplr.telemetry.prometheus import PrometheusListener
from tplr.telemetry.wandb import WandbListener

__all__ = ["JsonlListener", "Listener", "PrometheusListener", "Telemetry", "WandbListener", "log_event", "read_events"]
