"""Events as nodes emit them, and views made of them."""

from network_events import recording, run

__all__ = ["recording", "run"]  # fixtures
