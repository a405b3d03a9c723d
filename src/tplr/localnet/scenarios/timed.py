"""Miners that work until they are paid, and from then on only when their evaluation is likely."""

from typing import Literal

from tplr.localnet.attackers import Honest, Noise, Timed
from tplr.localnet.scenarios.base import EFFORT, LAUNCH, PAID_WINDOWS, Figures, Setting, live, mean, network, pay, ratio
from tplr.localnet.simulation import Member

TIMED: dict[str, Literal["noise", "poison"]] = {
    "timed work once paid, noise else": "noise",
    "timed work once paid, poison else": "poison",
}
HONEST, EACH = 6, 2
NEWCOMERS = 14  # with them, as in the crowd, two thirds of all miners are evaluated in a window
BEGIN = LAUNCH + 8  # last window in which they work without regard to evaluations


def timed_once_paid(setting: Setting, tests: int | None = None) -> Figures:
    """Simulate six honest miners, two miners of each kind in ``TIMED``, and newcomers that send random values.

    Args:
        tests: number of own-pages tests in a window, instead of production's.
    """
    crews = {name: [Timed(name, EFFORT, one, last=BEGIN) for _ in range(EACH)] for name, one in TIMED.items()}
    members: list[Member] = [Honest(EFFORT) for _ in range(HONEST)]
    members += [one for crew in crews.values() for one in crew]
    members += [Noise("random values") for _ in range(NEWCOMERS)]
    world = network(setting, members, tests=tests)

    def over_equal(name: str) -> float:
        return ratio(mean(pay(world, [one.uid for one in crews[name]])), mean(pay(world, range(1, HONEST + 1))))

    live(world, BEGIN)
    found: Figures = {f"{name}: before": over_equal(name) for name in TIMED}
    live(world, PAID_WINDOWS)
    for name, crew in crews.items():
        found[name] = over_equal(name)
        worked = [sum(window > BEGIN for window in one.worked) for one in crew]
        found[f"{name}: work"] = mean(worked) / PAID_WINDOWS
    return found
