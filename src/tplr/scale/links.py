"""When transfers over one link end: fluid flows that share it equally, each with at most one connection's rate.

A store's side has no limit (R2 documents none), so the flows of a node share nothing but its own link: the max-min fair
rates are ``min(connection, capacity / flows)``, and completion times follow in closed form between two changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# Bytes of a TCP segment; the constant of the rate of a connection with random losses, in segments per round trip.
SEGMENT, MATHIS = 1460, 1.22


def connection_rate(latency: float, loss: float) -> float:
    """Bytes per second that one TCP connection reaches: Mathis et al. 1997, ``1.22 * segment / (rtt * sqrt(loss))``.

    Args:
        latency: of a round trip, in seconds.
        loss: share of the packets, above 0.
    """
    return MATHIS * SEGMENT / (latency * loss**0.5)


def finish_times(
    starts: Sequence[float], size: float | Sequence[float], *, capacity: float, connection: float
) -> list[float]:
    """When each of these transfers of ``size`` bytes ends.

    All flows have the same rate at any time. Let ``served`` be the bytes that a flow has got which was there all the
    time. A flow that begins at ``served = v`` ends at ``v + size``.

    Args:
        starts: seconds, in any order; infinite: never.
        size: bytes of all, or of each.
        capacity, connection: bytes per second of the link, and of one flow.
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
