"""Bounds on the figures of ``scenarios``: the project's targets for the pay of attacks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from tplr.localnet.attackers import HalfAbsent, Timed
from tplr.localnet.scenarios import Figures
from tplr.localnet.scenarios.base import EFFORT, FEW_TESTS
from tplr.localnet.scenarios.crowds import cheats
from tplr.localnet.scenarios.harm import MANY, SHORT_ONCE, TENFOLD
from tplr.localnet.scenarios.owners import IN_TURNS, NOISY
from tplr.localnet.scenarios.pages import (
    CROWDERS,
    LISTED_VICTIM,
    NOT_TESTED,
    OTHER_OVERFITTER,
    PAGES_OVERFITTER,
    READERS,
    SIBLINGS,
    VICTIM,
)
from tplr.localnet.scenarios.steep import LITTLE, SHORTER, STEEP
from tplr.localnet.scenarios.timed import TIMED


@dataclass(frozen=True)
class Target:
    """Bounds of a figure over all seeds.

    Attributes:
        median, worst: upper bounds; lower bounds if ``least``.
    """

    figure: str
    median: float
    worst: float
    least: bool = False

    def reached(self, values: Iterable[float]) -> tuple[float, float]:
        """Return the median and the worst of a figure's values."""
        found = sorted(values)
        return median(found), found[0 if self.least else -1]

    def met(self, values: Iterable[float]) -> bool:
        """Return whether both bounds hold."""
        middle, worst = self.reached(values)
        if self.least:
            return middle >= self.median and worst >= self.worst
        return middle <= self.median and worst <= self.worst


def _of_cheats() -> list[Target]:
    found = []
    for one in cheats():
        if one.name == "go dark":
            found.append(Target(one.name, 0.0, 0.0))
        elif isinstance(one, Timed):
            found.append(Target(one.name, 0.3, 0.5))
        elif isinstance(one, HalfAbsent):
            # Half of an honest miner's work, which earns pay for what it delivers.
            found.append(Target(one.name, 0.6, 0.8))
        else:
            found.append(Target(f"{one.name}: over the least honest", 0.1, 0.3))
    return found


CREWS = (
    "5 sign flippers",
    "12 sign flippers",
    f"{MANY} sign flippers",
    "5 norm giants",
    "6 senders of zeros",
    "5 norm giants of honest direction",
    "12 late norm giants of honest direction",
    "5 senders of a thousandth",
    "12 senders of a thousandth",
)
# They have places and pay, because the predicted gain of each is positive.
PAID_CREWS = ("5 senders of a twentieth", "12 senders of a twentieth", *TENFOLD)
SEALED = ("sealed reports", "sealed reports and weights")
_TIMED = [
    *(Target(name, 0.3, 0.5) for name in TIMED),
    # The row above says nothing of miners that were not paid before.
    *(Target(f"{name}: before", 0.77, 0.62, least=True) for name in TIMED),
]
_EFFORTS = [
    Target("24 sequences over 8", 1.0, 1.0, least=True),
    Target("64 sequences over 24", 1.0, 1.0, least=True),
]
TARGETS = [
    *_of_cheats(),
    *_TIMED,
    *_EFFORTS,
    *(replace(one, figure=f"{FEW_TESTS}{one.figure}") for one in (*_of_cheats(), *_TIMED, *_EFFORTS)),
    Target("identical over 8 uids", 1.2, 1.2),
    Target("near-identical over 8 uids", 1.2, 1.2),
    Target(IN_TURNS, 1.2, 1.2),
    *(Target(name, 1.2, 1.2) for name in NOISY),
    *(Target(f"{crew}: gathered after probation", 0.0, 0.0) for crew in CREWS),
    *(Target(f"{crew}: loss", 1.02, 1.02) for crew in (*CREWS, *PAID_CREWS)),
    *(Target(f"{crew}: over the least honest", 0.1, 0.3) for crew in TENFOLD),
    *(Target(f"{crew}: over an honest miner of {LITTLE}", 0.1, 0.3) for crew in STEEP),
    # It decreases the loss, but not by more than the work of an equal miner.
    Target(f"{SHORTER}: over an honest miner of {LITTLE}", 1.3, 1.6),
    *(Target(f"{crew}: loss", 1.02, 1.02) for crew in (*STEEP, SHORTER)),
    # They work in all windows but one.
    *(Target(f"{crew}: over an honest miner", 1.3, 1.6) for crew in SHORT_ONCE),
    Target("three equal miners, largest over smallest", 1.3, 1.6),
    Target("seven equal miners, largest over smallest", 1.3, 1.6),
    # A declared norm brings no more than the chance that separates equal miners.
    Target(f"{EFFORT} sequences of tenfold norm, over an honest miner of {EFFORT}", 1.3, 1.6),
    Target("8 sequences of tenfold norm, over an honest miner of 8", 1.3, 1.6),
    Target(f"{EFFORT} sequences, over 8 of tenfold norm", 1.0, 1.0, least=True),
    Target("tenfold norm of 4 of 15 miners: loss", 1.02, 1.02),
    # Training on known pages brings no more than the chance that separates equal miners.
    *(Target(f"{name}: over as many other pages", 1.3, 1.6) for name in (READERS, SIBLINGS, PAGES_OVERFITTER)),
    # Without pay for those that read other pages, the comparison says nothing.
    Target(f"{NOT_TESTED}: over an equal miner", 1.0, 1.0, least=True),
    Target(f"beside siblings, {NOT_TESTED}: over an equal miner", 1.0, 1.0, least=True),
    Target(f"{OTHER_OVERFITTER}: over an equal miner", 0.3, 0.2, least=True),
    Target(f"{PAGES_OVERFITTER}: over the least honest", 0.1, 0.3),
    # As for equal miners: 1 / 1.3 and 1 / 1.6.
    *(Target(f"{victim}: over an equal miner", 0.77, 0.62, least=True) for victim in (VICTIM, LISTED_VICTIM)),
    Target(f"{CROWDERS}: over an equal miner", 0.1, 0.3),
    Target("5 periodic turncoats: windows in which they harm, at last", 0.0, 0.0),
    Target("5 dormant wreckers: windows in which they harm, at last", 0.0, 0.0),
    Target("windows lost: pay per window, largest over smallest", 1.3, 1.6),
    Target("windows lost: more over fewer", 1.0, 1.0),
    # Scores can only be copied from an earlier epoch.
    *(Target(f"score copier, {sealed}: epochs old", 1.0, 1.0, least=True) for sealed in SEALED),
]


def missed(runs: Iterable[Figures]) -> list[str]:
    """Return the targets that runs of one setting and several seeds miss; skips figures that no run has."""
    runs = list(runs)
    lines = []
    for target in TARGETS:
        values = [run[target.figure] for run in runs if target.figure in run]
        if values and not target.met(values):
            middle, worst = target.reached(values)
            lines.append(f"{target.figure}: {middle:.3g}, worst {worst:.3g}; {target.median:g}, {target.worst:g}")
    return lines
