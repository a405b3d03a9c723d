"""Miners that harm the model: from the start, after they have earned their places, or now and then."""

from collections.abc import Sequence

from tplr.localnet.attackers import (
    Changed,
    Dormant,
    HidingTurncoat,
    Honest,
    Noise,
    PeriodicTurncoat,
    Scaled,
    Turncoat,
    Zeros,
)
from tplr.localnet.scenarios.base import (
    EFFORT,
    LAUNCH,
    PAID_WINDOWS,
    PROBATION,
    Figures,
    Setting,
    live,
    mean,
    network,
    pay,
    ratio,
    tenfold,
)
from tplr.localnet.simulation import Member, World


def flip() -> Member:
    """Return a miner that trains, and sends the opposite of its work."""
    return Changed("signs flipped", 8, lambda one, _: -one)


def wreckers(setting: Setting) -> Figures:
    """Simulate three honest miners alone, then with each kind of harmful majority, for all paid windows."""
    last = LAUNCH + PAID_WINDOWS
    alone = beside_honest(setting, (), last)
    without, paid = alone.held_out_loss(), pay(alone, (1, 2, 3))
    found: Figures = {"three equal miners, largest over smallest": ratio(max(paid), min(paid))}
    crews: dict[str, list[Member]] = {
        "5 sign flippers": [flip() for _ in range(5)],
        "12 sign flippers": [flip() for _ in range(12)],
        "5 norm giants": [Noise("giant", 1e6) for _ in range(5)],
        "6 senders of zeros": [Zeros("zeros") for _ in range(6)],
    }
    for name, crew in crews.items():
        found |= crew_figures(name, beside_honest(setting, crew, last), without)
    return found


MANY = 40  # more than twice the places on probation


def many_wreckers(setting: Setting) -> Figures:
    """Simulate three honest miners alone, then with so many sign flippers that newcomers wait for probation."""
    last = LAUNCH + PAID_WINDOWS
    without = beside_honest(setting, (), last).held_out_loss()
    world = beside_honest(setting, [flip() for _ in range(MANY)], last)
    return crew_figures(f"{MANY} sign flippers", world, without)


def beside_honest(setting: Setting, crew: Sequence[Member], windows: int) -> World:
    """Return a network of three honest miners, uids 1 to 3, and a crew, after ``windows`` windows."""
    return live(network(setting, [*(Honest(EFFORT) for _ in range(3)), *crew]), windows)


def crew_figures(name: str, world: World, without: float) -> Figures:
    """Return the figures of a crew beside three honest miners, whose loss alone is ``without``."""
    late = [record for record in world.records if record.window > LAUNCH]
    return {
        f"{name}: gathered after probation": sum(uid > 3 for record in late for uid in record.peers),
        f"{name}: loss": world.held_out_loss() / without,
        f"{name}: pay": sum(pay(world, range(4, 1 + len(world.by_uid)))),
    }


WRECKED = 12  # windows
SHRUNK = {"a thousandth": 1e-3, "a twentieth": 0.05}


def shrunk(setting: Setting) -> Figures:
    """Simulate three honest miners alone, then with majorities that send small fractions of honest updates.

    With a place on the list they would dilute a mean, and more than three quarters of a set could lower the norm caps.
    """
    without = beside_honest(setting, (), WRECKED).held_out_loss()
    found: Figures = {}
    for share, scale in SHRUNK.items():
        for count in (5, 12):
            crew = [Scaled("shrunk", EFFORT, scale) for _ in range(count)]
            found |= crew_figures(f"{count} senders of {share}", beside_honest(setting, crew, WRECKED), without)
    return found


SHORT_ONCE = {"5 miners short in one window": 5, "12 miners short in one window": 12}
SHORT_WINDOW = LAUNCH + 8


def short_once(setting: Setting) -> Figures:
    """Simulate three honest miners, and majorities that send a thirtieth of an honest update in one window.

    If the lengths of a window's updates set the scale of its measures, it would count like many windows.
    """
    found: Figures = {}
    for name, count in SHORT_ONCE.items():
        crew = [Scaled("short once", EFFORT, 1 / 30, only=SHORT_WINDOW) for _ in range(count)]
        world = beside_honest(setting, crew, LAUNCH + PAID_WINDOWS)
        of_crew, of_honest = pay(world, range(4, 4 + count)), pay(world, (1, 2, 3))
        found[f"{name}: over an honest miner"] = ratio(mean(of_crew), mean(of_honest))
    return found


LATE = LAUNCH + 2  # first window of late giants
TENFOLD = {"5 miners of tenfold norm": 5, "12 miners of tenfold norm": 12}


def giants(setting: Setting) -> Figures:
    """Simulate three honest miners alone, then with majorities that multiply honest updates."""

    def crew(count: int, scale: float, begin: int = 0) -> list[Member]:
        return [Scaled("giant", EFFORT, scale, begin=begin) for _ in range(count)]

    crews = {
        "5 norm giants of honest direction": crew(5, 1e6),
        "12 late norm giants of honest direction": crew(12, 1e6, LATE),
        **{name: [tenfold(EFFORT) for _ in range(count)] for name, count in TENFOLD.items()},
    }
    last = LATE + PROBATION + 8  # an honest miner that begins late has a place by then
    without = beside_honest(setting, (), last).held_out_loss()
    found: Figures = {}
    for name, members in crews.items():
        world = beside_honest(setting, members, last)
        of_crew, of_honest = pay(world, range(4, 4 + len(members))), pay(world, (1, 2, 3))
        found |= crew_figures(name, world, without)
        found[f"{name}: over the least honest"] = ratio(mean(of_crew), min(of_honest))
    return found


TURN = LAUNCH + 8  # last honest window of turncoats


def turncoats(setting: Setting) -> Figures:
    """Simulate three honest miners, and five that turn harmful after they have earned their places."""
    world = beside_honest(setting, [Turncoat("turncoat", EFFORT, TURN) for _ in range(5)], TURN)
    before = world.held_out_loss()
    live(world, WRECKED)
    return {
        "5 turncoats: windows in which they harm": sum(included_after_turn(world)),
        "5 turncoats: loss, over that when they turned": world.held_out_loss() / before,
        "5 turncoats: pay": sum(pay(world, range(4, 9))),
    }


def included_after_turn(world: World) -> list[bool]:
    """Return whether one of the uids above 3 is in the set, for each window after ``TURN``."""
    windows = [record.seen.observations for record in world.records if record.window > TURN]
    return [any(seen.included for uid, seen in one.items() if uid > 3) for one in windows]


HARMFUL = 5  # of every ``PAID_WINDOWS`` windows


def periodic_turncoats(setting: Setting) -> Figures:
    """Simulate three honest miners, and five that harm in a quarter of the windows, and work in the others."""
    crew = [PeriodicTurncoat("periodic turncoat", EFFORT, TURN, harmful=HARMFUL, period=PAID_WINDOWS) for _ in range(5)]
    world = beside_honest(setting, crew, TURN)
    before = world.held_out_loss()
    live(world, 2 * PAID_WINDOWS)
    included = included_after_turn(world)
    harmful = [one for i, one in enumerate(included) if i % PAID_WINDOWS < HARMFUL]
    return {
        "5 periodic turncoats: windows in which they harm": sum(harmful),
        "5 periodic turncoats: windows in which they harm, at last": sum(harmful[HARMFUL:]),
        "5 periodic turncoats: loss, over that when they turned": world.held_out_loss() / before,
        "5 periodic turncoats: pay": sum(pay(world, range(4, 9))),
    }


SELDOM, OFTEN = 2, 12  # windows in which hiding turncoats harm, of so many


def hiding_turncoats(setting: Setting) -> Figures:
    """Simulate three honest miners, and five that harm now and then, in updates that name other pages."""
    name = "5 hiding turncoats"
    crew = [HidingTurncoat("hiding turncoat", EFFORT, TURN, harmful=SELDOM, period=OFTEN) for _ in range(5)]
    world = beside_honest(setting, crew, TURN)
    before = world.held_out_loss()
    live(world, PAID_WINDOWS)
    harmful = [one for i, one in enumerate(included_after_turn(world)) if i % OFTEN < SELDOM]
    return {
        f"{name}: windows in which they harm": sum(harmful),
        f"{name}: loss, over that when they turned": world.held_out_loss() / before,
        f"{name}: pay": sum(pay(world, range(4, 9))),
    }


def dormants(setting: Setting) -> Figures:
    """Simulate three honest miners, and five that harm in two of twenty windows and are late in the others."""
    crew = [Dormant("dormant wrecker", 8, TURN) for _ in range(5)]
    harmful = included_after_turn(beside_honest(setting, crew, TURN + 3 * PAID_WINDOWS))
    return {
        "5 dormant wreckers: windows in which they harm": sum(harmful),
        "5 dormant wreckers: windows in which they harm, at last": sum(harmful[-PAID_WINDOWS:]),
    }
