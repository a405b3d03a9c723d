"""Compares pay with delivered windows, from a validator's events: checks that no miner gains by faults."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tplr.telemetry.events import Event

# With fewer windows a mean is hardly significant, and pay is below its share (``scoring/credit.py``).
FEWEST_WINDOWS = 5
# Minimum difference of lost windows between two miners for which their order by pay is meaningful.
FEWEST_MORE = 3


@dataclass(frozen=True)
class Earned:
    """A miner's share of the pay after a window, and its delivered windows.

    Attributes:
        delivered, lost: number of the last ``pay_windows`` scored windows whose set includes its update, or does not.
    """

    share: float
    delivered: int
    lost: int


def earned(events: Iterable[Event], *, pay_windows: int) -> dict[int, dict[int, Earned]]:
    """Return each miner's ``Earned`` after each scored window, by window, then by uid. Shares are of final scores.

    Args:
        events: one validator's, including those of its earlier processes.
    """
    included: dict[int, frozenset[int]] = {}
    finals: dict[int, Mapping[str, float]] = {}
    for event in events:
        if event["event"] == "applied":
            included[event["window"]] = frozenset(event["included"])
        elif event["event"] == "scores":
            finals[event["window"]] = event["scores"]
    found = {}
    for last, scores in sorted(finals.items()):
        span = [window for window in finals if last - pay_windows < window <= last]
        whole = sum(scores.values())
        found[last] = {}
        for uid, final in scores.items():
            delivered = sum(int(uid) in included.get(window, ()) for window in span)
            share = final / whole if whole else 0.0
            found[last][int(uid)] = Earned(share, delivered, len(span) - delivered)
    return found


def spread(pay: Mapping[int, Earned]) -> float | None:
    """Return the ratio of largest to smallest pay per delivered window, among miners with ``FEWEST_WINDOWS``.

    Infinite if only some of them earn anything; None if there are fewer than two, or none earns anything.
    """
    each = [one.share / one.delivered for one in pay.values() if one.delivered >= FEWEST_WINDOWS]
    if len(each) < 2 or not any(each):
        return None
    return max(each) / min(each) if min(each) > 0 else math.inf


def gains_by_loss(pay: Mapping[int, Earned]) -> list[tuple[int, int]]:
    """Return pairs of uids whose first lost at least ``FEWEST_MORE`` more windows than the second but earns more."""
    return [
        (uid, other)
        for uid, one in sorted(pay.items())
        for other, less in sorted(pay.items())
        if one.lost >= less.lost + FEWEST_MORE and one.share > less.share
    ]
