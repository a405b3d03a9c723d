"""How often a node looks again for what is not there yet.

Each look is a request that the bucket's owner pays for, by each of its readers: 276 nodes that look twice a second for
two minutes are 60,000 requests a window. So the pauses grow with the time that was waited, and nobody learns of an
object later than ``GROWTH`` of that time.
"""

GROWTH = 0.05


def pause_after(waited: float, shortest: float) -> float:
    """Seconds until the next look after ``waited`` seconds of looking; at least ``shortest``."""
    return max(shortest, GROWTH * waited)
