"""Formulas from losses, reports and ratings to the factors of a documented score."""

from tplr.schemas import OUT_OF_SYNC, UNREAD, Evaluation
from tplr.scoring.measures import gain

SYNC_SPAN = 5.0
SYNC_EXPONENT = 2.5


def binary_indicator(measured: Evaluation) -> float:
    """Return 1 if the update helps more on the miner's assigned pages than on held-out ones, else -1."""
    better = measured.assigned is not None and gain(measured.assigned) > gain(measured.held_out)
    return 1.0 if better else -1.0


def moving_average(old: float, new: float, alpha: float) -> float:
    """Return ``(1 - alpha) * old + alpha * new``; it starts at 0, so that few lucky evaluations are worth little."""
    return (1 - alpha) * old + alpha * new


def sync_score(behind: int) -> float:
    """Return ``(1 - min(behind, 5) / 5) ** 2.5``; 0 for another model."""
    if behind in (OUT_OF_SYNC, UNREAD):
        return 0.0
    return (1 - min(float(behind), SYNC_SPAN) / SYNC_SPAN) ** SYNC_EXPONENT


def base_score(*, ordinal: float, binary: float, sync: float) -> float:
    """Return the score before penalties: ``ordinal * max(0, binary) * sync``, which may be negative."""
    return ordinal * max(0.0, binary) * sync
