"""Polling interval for objects that do not exist yet.

The bucket's owner pays for every request of every reader: 276 nodes that poll twice a second for two minutes make
60,000 requests a window. So the pauses grow in proportion to the time waited: the delay in finding an object is at most
``GROWTH`` of that time.
"""

GROWTH = 0.05


def pause_after(waited: float, shortest: float) -> float:
    """Return the seconds until the next poll after ``waited`` seconds of polling; at least ``shortest``."""
    return max(shortest, GROWTH * waited)
