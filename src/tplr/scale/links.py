"""Computes completion times of transfers over one link: fluid flows with equal shares, capped at a connection's rate.

Stores have no rate limit (R2 documents none), so a node's flows share only the node's own link. The max-min fair rate
of each is ``min(connection, capacity / flows)``, and completion times follow in closed form between two changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# Bytes of a TCP segment, and the constant of the rate formula for random losses (segments per round trip).
SEGMENT, MATHIS = 1460, 1.22


def connection_rate(latency: float, loss: float) -> float:
    """Return one TCP connection's rate, bytes per second: ``1.22 * segment / (rtt * sqrt(loss))`` (Mathis et al. 1997).

    Args:
        latency: round-trip time, in seconds.
        loss: share of packets that are lost, above 0.
    """
    return MATHIS * SEGMENT / (latency * loss**0.5)


def finish_times(
    starts: Sequence[float], size: float | Sequence[float], *, capacity: float, connection: float
) -> list[float]:
    """Return the end of each transfer, in seconds; infinite for one that never starts.

    All flows have the same rate at any time. Let ``served`` be the bytes that a flow would have received if it had been
    active from the beginning. A flow that begins at ``served = v`` ends at ``served = v + size``.

    Args:
        starts: seconds, in any order; infinite: never.
        size: bytes of every transfer, or one number for each.
        capacity, connection: bytes per second of the link, and the limit of one flow.
    """
    sizes = size if isinstance(size, Sequence) else [size] * len(starts)
    ends = [float("inf")] * len(starts)
    order = sorted((start, place) for place, start in enumerate(starts) if start != float("inf"))
    if not order:
        return ends
    active: list[tuple[float, int]] = []
    now, served, following = order[0][0], 0.0, 0
    while active or following < len(order):
        rate = min(connection, capacity / len(active)) if active else 0.0
        done = now + (active[0][0] - served) / rate if active else float("inf")
        if following < len(order) and order[following][0] <= done:
            start, place = order[following]
            served += (start - now) * rate
            heapq.heappush(active, (served + sizes[place], place))
            now, following = start, following + 1
            continue
        served, place = heapq.heappop(active)
        now = ends[place] = max(now, done)
    return ends
