"""Scenarios: small networks with honest miners and attackers, and the figures that each scenario yields.

Budgets are production's, except in scenarios with few tests: a validator tests ``uids_per_window`` miners per window,
and gathers 15. Shares of pay are those after the last window. "Equal" is the mean pay of honest miners of the same
effort whose updates nobody copies, "least" the smallest pay of an honest miner.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tplr.localnet.scenarios.base import Figures, Setting, few_tests
from tplr.localnet.scenarios.copiers import score_copiers
from tplr.localnet.scenarios.crowds import crowd
from tplr.localnet.scenarios.harm import (
    dormants,
    giants,
    hiding_turncoats,
    many_wreckers,
    periodic_turncoats,
    short_once,
    shrunk,
    turncoats,
    wreckers,
)
from tplr.localnet.scenarios.honest import losses, norms
from tplr.localnet.scenarios.owners import SPLIT, dealt, in_turns, noisy, pooled, split, tenfold_parts, twins
from tplr.localnet.scenarios.pages import crowders, listed_crowders, readers, siblings
from tplr.localnet.scenarios.steep import plain_gradients
from tplr.localnet.scenarios.timed import timed_once_paid

__all__ = ["SCENARIOS", "Figures", "Scenario", "Setting"]


@dataclass(frozen=True)
class Scenario:
    """A named scenario.

    Attributes:
        figures: function that runs it.
        cost: relative run time, for forecasts.
        single_bytes: whether it also runs with single bytes as tokens.
    """

    figures: Callable[[Setting], Figures]
    cost: float
    single_bytes: bool = False


SCENARIOS: dict[str, Scenario] = {
    "crowd": Scenario(crowd, 60.0, single_bytes=True),
    "crowd, few tests": Scenario(few_tests(crowd), 50.0),
    "timed once paid": Scenario(timed_once_paid, 35.0),
    "timed once paid, few tests": Scenario(few_tests(timed_once_paid), 30.0),
    "twins": Scenario(twins, 35.0, single_bytes=True),
    "in turns": Scenario(in_turns, 45.0),
    "noisy": Scenario(noisy, 45.0),
    "split 8": Scenario(lambda setting: split(setting, 8), 45.0, single_bytes=True),
    "split 64": Scenario(lambda setting: split(setting, 64), 70.0, single_bytes=True),
    "split 64, tenfold norm": Scenario(lambda one: split(one, 64, tenfold_parts, f"{SPLIT}, tenfold norm"), 70.0),
    "split 64, pooled": Scenario(lambda one: split(one, 64, pooled, f"{SPLIT}, pooled"), 70.0),
    "dealt": Scenario(lambda setting: split(setting, 64, dealt, "dealt over 8 uids"), 55.0),
    "wreckers": Scenario(wreckers, 85.0, single_bytes=True),
    "many wreckers": Scenario(many_wreckers, 45.0),
    "giants": Scenario(giants, 65.0, single_bytes=True),
    "plain gradients": Scenario(plain_gradients, 35.0),
    "shrunk": Scenario(shrunk, 40.0),
    "short once": Scenario(short_once, 30.0),
    "losses": Scenario(losses, 10.0, single_bytes=True),
    "turncoats": Scenario(turncoats, 10.0),
    "periodic turncoats": Scenario(periodic_turncoats, 22.0),
    "hiding turncoats": Scenario(hiding_turncoats, 14.0),
    "dormants": Scenario(dormants, 40.0),
    "norms": Scenario(norms, 55.0, single_bytes=True),
    "crowders": Scenario(crowders, 30.0),
    "listed crowders": Scenario(listed_crowders, 25.0),
    "readers": Scenario(readers, 30.0, single_bytes=True),
    "siblings": Scenario(siblings, 30.0, single_bytes=True),
    "score copiers": Scenario(score_copiers, 15.0),
}
