"""Computes how long a joining or returning node takes to load a checkpoint and to apply the missing windows."""

from __future__ import annotations

import math
from typing import NamedTuple

from tplr.hparams import HParams

# Number of windows reported for a node that never catches up.
MOST_WINDOWS = 100_000


class CatchUp(NamedTuple):
    """Result of ``catch_up``; times are seconds since the node's start.

    Attributes:
        restored: time at which the checkpoint is loaded; 0 without one.
        seconds: time at which no window is missing; infinite: never.
        windows: number of windows that it applied one by one.
        fetched: bytes downloaded.
    """

    restored: float
    seconds: float
    windows: int
    fetched: float


def catch_up(
    hparams: HParams,
    *,
    behind: int,
    checkpoint: float,
    update: float,
    rate: float,
    window_seconds: float,
    apply: float,
    checkpoint_age: int | None,
) -> CatchUp:
    """Compute how a node that lacks the last ``behind`` windows catches up.

    The rule of ``Replica.open`` decides whether it loads a checkpoint. While the node applies one window it fetches the
    next two, so each window takes the longer of fetching and applying.

    Args:
        behind: number of missing windows; all of the run's windows for a newcomer.
        checkpoint, update: bytes fetched for a checkpoint, and for one update.
        rate: bytes per second.
        apply: seconds for applying a window.
        checkpoint_age: windows that ended since the newest published checkpoint; None: there is none.
    """
    missing, restored, fetched = behind, 0.0, 0.0
    if checkpoint_age is not None and behind > checkpoint_age + hparams.checkpoint_frequency:
        missing, fetched = checkpoint_age, checkpoint
        restored = checkpoint / rate
    aggregate = hparams.max_topk_peers * update
    each = max(aggregate / rate, apply)
    # ``missing`` windows after the restored checkpoint, plus each window that ends before the node is done.
    ended = missing + restored / window_seconds
    if each >= window_seconds:
        return CatchUp(restored, math.inf, MOST_WINDOWS, math.inf)
    seconds = restored + ended * each / (1 - each / window_seconds)
    windows = math.ceil(missing + seconds / window_seconds)
    return CatchUp(restored, seconds, windows, fetched + windows * aggregate)
