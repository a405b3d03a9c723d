"""Pay against windows delivered, from the events of a validator: what faults cost a miner, and nobody gains by them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tplr.telemetry.events import Event

# Of fewer windows a mean is hardly beyond chance, and pay is below its share (``scoring/credit.py``).
FEWEST_WINDOWS = 5
# Windows that one miner has to have lost more than another, if their order is to mean anything.
FEWEST_MORE = 3


@dataclass(frozen=True)
class Earned:
    """A miner's share of the pay after a window, and how it came about.

    Attributes:
        delivered, lost: windows of the last ``pay_windows`` that the validator scored, whose set has its update or not.
    """

    share: float
    delivered: int
    lost: int


def earned(events: Iterable[Event], *, pay_windows: int) -> dict[int, dict[int, Earned]]:
    """By scored window, then by uid: what each miner has earned after it. Shares are of final scores.

    Args:
        events: of one validator, also those of its earlier processes.
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
    """Largest over smallest pay for each window delivered; None for fewer than two with ``FEWEST_WINDOWS``."""
    each = [one.share / one.delivered for one in pay.values() if one.delivered >= FEWEST_WINDOWS]
    return max(each) / min(each) if len(each) > 1 and min(each) > 0 else None


def gains_by_loss(pay: Mapping[int, Earned]) -> list[tuple[int, int]]:
    """Pairs of uids of which the first lost at least ``FEWEST_MORE`` windows more than the second, and earns more."""
    return [
        (uid, other)
        for uid, one in sorted(pay.items())
        for other, less in sorted(pay.items())
        if one.lost >= less.lost + FEWEST_MORE and one.share > less.share
    ]
