"""Finds miners whose steps overshoot: along the window's step their gain vanishes faster than other miners'."""

from collections.abc import Mapping, Sequence

import numpy as np

from tplr.scoring.calibration import by_gradient
from tplr.scoring.credit import even_scales
from tplr.scoring.measured_window import MeasuredWindow


def by_middle(windows: Sequence[MeasuredWindow], hotkeys: Mapping[int, str]) -> dict[int, float]:
    """Return the factor by middle of ``Calibration`` of these miners, by uid."""
    if not windows:
        return dict.fromkeys(hotkeys, 1.0)
    pairs = np.array([[one.middle_and_gain(*miner) for miner in hotkeys.items()] for one in windows])
    lengths = np.array([[one.length(uid) for uid in hotkeys] for one in windows])
    counted = np.array([[bool(one.counts(*miner)) for miner in hotkeys.items()] for one in windows], dtype=bool)
    scales = even_scales([one.included_gains for one in windows])[:, None]
    middle, gains = np.moveaxis(pairs.reshape(*lengths.shape, 2), 2, 0) * scales
    factors = by_gradient(middle, gains, lengths * scales, counted & np.isfinite(gains))
    return dict(zip(hotkeys, factors.tolist(), strict=True))
