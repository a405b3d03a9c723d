"""Honest miners: of equal effort, of more and less, with lost windows, and beside larger norms."""

from collections.abc import Callable

import numpy as np

from tplr.localnet.attackers import Honest, Lossy
from tplr.localnet.scenarios.base import (
    EFFORT,
    LAUNCH,
    PAID_WINDOWS,
    Figures,
    Setting,
    live,
    mean,
    network,
    pay,
    ratio,
    tenfold,
)
from tplr.localnet.simulation import Member
from tplr.seeds import derive

EQUALS, FEW = 7, 3  # miners of average and of little effort


def losses(setting: Setting) -> Figures:
    """Simulate three equal miners, of which two lose 3 and 6 of the paid windows."""
    last = LAUNCH + PAID_WINDOWS
    random = np.random.default_rng(derive("losses", setting.seed) >> 1)
    lost = [
        sorted(random.choice(np.arange(LAUNCH + 1, last + 1), count, replace=False).tolist()) for count in (0, 3, 6)
    ]
    world = live(network(setting, [Lossy(EFFORT, one) for one in lost]), last)
    paid = pay(world, (1, 2, 3))
    each = [one / (PAID_WINDOWS - len(gone)) for one, gone in zip(paid, lost, strict=True)]
    return {
        "windows lost: pay per window, largest over smallest": ratio(max(each), min(each)),
        "windows lost: more over fewer": max(ratio(paid[1], paid[0]), ratio(paid[2], paid[1])),
    }


def norms(setting: Setting) -> Figures:
    """Simulate honest miners of three efforts beside miners of tenfold norm, then the same miners with honest norms.

    The own-pages factors of miners of little effort differ by chance, so their figures are means over several.
    """

    def outcome(norm: Callable[[int], Member]) -> tuple[list[float], float]:
        members = [*map(Honest, [EFFORT] * EQUALS + [8] * FEW + [64]), *map(norm, [EFFORT] + [8] * FEW)]
        world = live(network(setting, members), LAUNCH + PAID_WINDOWS)
        return pay(world, range(1, len(members) + 1)), world.held_out_loss()

    (paid, loss), (_, without) = outcome(tenfold), outcome(Honest)
    equals, little, scaled_little = paid[:EQUALS], paid[EQUALS : EQUALS + FEW], paid[-FEW:]
    scaled = paid[-FEW - 1]
    return {
        "seven equal miners, largest over smallest": ratio(max(equals), min(equals)),
        f"{EFFORT} sequences of tenfold norm, over an honest miner of {EFFORT}": ratio(scaled, mean(equals)),
        "8 sequences of tenfold norm, over an honest miner of 8": ratio(mean(scaled_little), mean(little)),
        f"{EFFORT} sequences, over 8 of tenfold norm": ratio(mean(equals), mean(scaled_little)),
        "tenfold norm of 4 of 15 miners: loss": loss / without,
    }
