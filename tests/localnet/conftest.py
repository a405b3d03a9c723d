"""Events in the format of nodes, and views made from them."""

from network_events import recording, run

__all__ = ["recording", "run"]  # fixtures
