"""How long a node takes that joins, or comes back: its checkpoint, then window by window until it has them all."""

from __future__ import annotations

import math
from typing import NamedTuple

from tplr.hparams import HParams

# A node that falls this many windows behind in its calculation never catches up.
MOST_WINDOWS = 100_000


class CatchUp(NamedTuple):
    """Result of a calculation, in seconds from the start of the node.

    Attributes:
        restored: until the checkpoint is loaded; 0 without one.
        seconds: until no window is missing; infinite: never.
        windows: that it applied, one by one.
        fetched: bytes.
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
    """A node without the last ``behind`` windows; by the rule of ``Replica.open`` it takes a checkpoint, or not.

    While one window is applied, the next two are fetched, so a window takes the longer of both.

    Args:
        behind: windows; all of the run's for a newcomer.
        checkpoint, update: bytes of what is fetched of a checkpoint, and of one update.
        rate: bytes per second.
        apply: seconds that a window takes to apply.
        checkpoint_age: windows that ended since the newest published checkpoint; None: there is none.
    """
    missing, restored, fetched = behind, 0.0, 0.0
    if checkpoint_age is not None and behind > checkpoint_age + hparams.checkpoint_frequency:
        missing, fetched = checkpoint_age, checkpoint
        restored = checkpoint / rate
    aggregate = hparams.max_topk_peers * update
    each = max(aggregate / rate, apply)
    # ``missing`` windows at the restored checkpoint, and one more with each that ends until the node is done.
    ended = missing + restored / window_seconds
    if each >= window_seconds:
        return CatchUp(restored, math.inf, MOST_WINDOWS, math.inf)
    seconds = restored + ended * each / (1 - each / window_seconds)
    windows = math.ceil(missing + seconds / window_seconds)
    return CatchUp(restored, seconds, windows, fetched + windows * aggregate)
