"""Scenarios: small networks with honest miners and attackers, and the figures that each scenario yields.

Budgets are production's: a validator tests ``uids_per_window`` miners per window, and gathers 15. Shares of pay are
those after the last window. "Equal" is the mean pay of honest miners of the same effort whose updates nobody copies,
"least" the smallest pay of an honest miner.
"""

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tplr.hparams import HParams
from tplr.localnet.attackers import (
    Changed,
    Copier,
    Dealt,
    Dormant,
    GoDark,
    HalfAbsent,
    Honest,
    Late,
    Lossy,
    Malformed,
    Noise,
    NoProof,
    OthersPages,
    OutOfSync,
    Overfitter,
    PagesOverfitter,
    PeriodicTurncoat,
    Repeater,
    Scaled,
    Timed,
    Turncoat,
    Twin,
    WrongPages,
    Zeros,
)
from tplr.localnet.attackers.scores import Copied, copied_weights
from tplr.localnet.plan import Scheme
from tplr.localnet.simulation import VALIDATOR, Member, World, profile, small
from tplr.schemas import PeerScore
from tplr.seeds import derive

Figures = dict[str, float]

EFFORT = 24  # sequences of an average miner, of at most 64
PAID_WINDOWS = 20
GATHERED = 15
PROBATION = 3  # windows
LAUNCH = 6  # windows until the first peer list with earned places
UIDS = 8  # number of uids of an owner with several


@dataclass(frozen=True)
class Setting:
    """The settings of a scenario's run. ``vocabulary``: ``simulation.VOCABULARY`` or ``SINGLE_BYTES``."""

    scheme: Scheme
    vocabulary: int
    seed: int


@dataclass(frozen=True)
class Scenario:
    """A named scenario.

    Attributes:
        figures: function that runs it.
        cost: relative run time, for forecasts.
        by_pages: whether its figures depend on page-specific content, so that it also runs with single bytes.
    """

    figures: Callable[[Setting], Figures]
    cost: float
    by_pages: bool = False


def network(setting: Setting, members: Sequence[Member], *, pages: int = 8) -> World:
    """Return a network with production's budgets and ``pages`` pages of 8 sequences for each miner."""
    constants = profile(setting.scheme)
    hparams = small(
        constants,
        uids_per_window=constants.uids_per_window,
        vocabulary=setting.vocabulary,
        max_topk_peers=GATHERED,
        probation_windows=PROBATION,
        pages_per_window=pages,
        validator_sample_rate=1e-3,  # so low that ``evaluation_sequences`` decides
    )
    return World(hparams, members, seed=setting.seed, measures_loss=False)


def live(world: World, windows: int) -> World:
    """Run a network for ``windows`` windows, and return it."""
    asyncio.run(world.run(windows))
    return world


def pay(world: World, uids: Iterable[int]) -> list[float]:
    """Return the shares of the pay of these uids."""
    weights = world.board.weights
    return [weights.get(uid, 0.0) for uid in uids]


def ratio(one: float, other: float) -> float:
    """Return ``one / other``: infinite if only ``other`` is 0, and 0 if both are."""
    return one / other if other else (math.inf if one else 0.0)


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


DARK = 10  # last window in which the miner that goes dark works
HONEST = (8, EFFORT, 64, EFFORT, EFFORT, EFFORT)
LESS, AVERAGE, MORE = 1, 2, 3
# Each victim has one copier, and an average miner without a copier is the reference.
VICTIMS, REFERENCE = (4, 5, MORE), (AVERAGE, 6)


def cheats() -> list[Member]:
    """Return one miner for each attack that needs only one uid."""
    return [
        GoDark("go dark", EFFORT, last=DARK),
        Timed("timed work, noise else", EFFORT, "noise"),
        Timed("timed work, poison else", EFFORT, "poison"),
        Noise("random values"),
        Zeros("zeros"),
        Changed("signs flipped", EFFORT, lambda one, _: -one),
        Scaled("norm giant", EFFORT, 1e6),
        Copier("copier", VICTIMS[0]),
        Copier("copier with noise", VICTIMS[1], noise=0.5),
        Copier("copier, 30 % own indices", VICTIMS[2], own_indices=0.3),
        Repeater("stale repeater", EFFORT),
        Overfitter("overfitter of large norm", EFFORT),
        WrongPages("wrong pages", EFFORT),
        HalfAbsent("absent every second window", EFFORT),
        OutOfSync("out of sync", EFFORT),
        NoProof("no proof of sync", EFFORT),
        Malformed("malformed in 20 ways", EFFORT),
        Late("late by one second", EFFORT),
    ]


def crowd(setting: Setting) -> Figures:
    """Simulate honest miners of three efforts with one attacker of each kind."""
    members = [*map(Honest, HONEST), *cheats()]
    world = live(network(setting, members), DARK + PAID_WINDOWS)
    honest = pay(world, range(1, len(HONEST) + 1))
    equal = mean(pay(world, REFERENCE))
    found: Figures = {
        "24 sequences over 8": ratio(honest[AVERAGE - 1], honest[LESS - 1]),
        "64 sequences over 24": ratio(honest[MORE - 1], honest[AVERAGE - 1]),
        "victim of a copier": ratio(honest[VICTIMS[0] - 1], equal),
        "honest pay": sum(honest),
    }
    for uid, member in world.by_uid.items():
        if not member.honest:
            (earned,) = pay(world, [uid])
            found[member.name] = ratio(earned, equal)
            found[f"{member.name}: over the least honest"] = ratio(earned, min(honest))
            found[f"{member.name}: gathered"] = sum(uid in record.peers for record in world.records)
        if isinstance(member, Overfitter):
            found[f"{member.name}: over 64 sequences"] = ratio(pay(world, [uid])[0], honest[MORE - 1])
        if isinstance(member, Timed):
            found[f"{member.name}: work"] = len(member.worked) / len(world.records)
    return found


def twins(setting: Setting) -> Figures:
    """Simulate four honest miners, and two owners of eight uids that send identical or near-identical updates."""
    same, near = len(range(4)) + 1, len(range(4)) + 1 + UIDS
    members: list[Member] = [Honest(EFFORT) for _ in range(4)]
    members += [Twin("identical", same, EFFORT) for _ in range(UIDS)]
    members += [Twin("near-identical", near, EFFORT, noise=0.3, own_indices=0.1) for _ in range(UIDS)]
    world = live(network(setting, members), LAUNCH + PAID_WINDOWS)
    equal = mean(pay(world, range(1, same)))
    return {
        "identical over 8 uids": ratio(sum(pay(world, range(same, near))), equal),
        "near-identical over 8 uids": ratio(sum(pay(world, range(near, near + UIDS))), equal),
    }


SPLIT = "split over 8 uids"
Owner = Callable[[int, Sequence[int]], list[Member]]


def honest_parts(effort: int, uids: Sequence[int]) -> list[Member]:
    """Return an owner whose uids have equal parts of its sequences, each on its own pages."""
    return [Honest(effort // len(uids)) for _ in uids]


def tenfold_parts(effort: int, uids: Sequence[int]) -> list[Member]:
    """Return the same with updates of tenfold norm."""
    return [tenfold(effort // len(uids)) for _ in uids]


def dealt(effort: int, uids: Sequence[int]) -> list[Member]:
    """Return an owner that trains once, on pages of all its uids, and sends a part of the update from each."""
    first = Dealt("dealt", effort, uids)
    return [first, *(Dealt("dealt", effort, uids, first) for _ in uids[1:])]


def split(setting: Setting, effort: int, owner: Owner = honest_parts, what: str = SPLIT) -> Figures:
    """Simulate an owner that splits ``effort`` sequences over eight uids, with three and with nine honest miners.

    Each honest miner has ``effort`` sequences. With SparseLoCo the median norm bounds a step; if the owner's uids are
    the majority, the median is their norm.

    Args:
        owner: makes its miners, for the number of sequences and their uids.
        what: what it does, for the figures' names.
    """
    found: Figures = {}
    for others, share in ((3, "most uids"), (9, "fewer uids")):
        whole, parts = range(1, others + 1), range(others + 1, others + 1 + UIDS)
        members = [*(Honest(effort) for _ in whole), *owner(effort, parts)]
        world = live(network(setting, members, pages=max(8, effort // 8)), LAUNCH + PAID_WINDOWS)
        name = f"{effort} sequences {what}, {share}"
        found[name] = ratio(sum(pay(world, parts)), mean(pay(world, whole)))
        of_whole, of_part = (mean(cosines(world, uids)) for uids in (whole, parts))
        found[f"{name}: cosine of a part over a whole"] = ratio(of_part, of_whole)
    return found


def cosines(world: World, uids: Iterable[int]) -> list[float]:
    """Mean cosine of each miner's step and the validator's gradient, whatever the step's length."""
    scores = [world.board.peer_scores[uid] for uid in uids]
    return [one.mean for one in scores if isinstance(one, PeerScore)]


WRECKED = 12  # windows


def wreckers(setting: Setting) -> Figures:
    """Simulate three honest miners alone, then with each kind of harmful majority."""

    def flip(_: int) -> Member:
        return Changed("signs flipped", 8, lambda one, _: -one)

    alone = live(network(setting, [Honest(EFFORT) for _ in range(3)]), WRECKED)
    without = alone.held_out_loss()
    live(alone, LAUNCH + PAID_WINDOWS - WRECKED)
    paid = pay(alone, (1, 2, 3))
    found: Figures = {"three equal miners, largest over smallest": ratio(max(paid), min(paid))}
    crews: dict[str, list[Member]] = {
        "5 sign flippers": [flip(i) for i in range(5)],
        "12 sign flippers": [flip(i) for i in range(12)],
        "5 norm giants": [Noise("giant", 1e6) for _ in range(5)],
        "6 senders of zeros": [Zeros("zeros") for _ in range(6)],
    }
    for name, crew in crews.items():
        world = live(network(setting, [*(Honest(EFFORT) for _ in range(3)), *crew]), WRECKED)
        late = [record for record in world.records if record.window > LAUNCH]
        found[f"{name}: gathered after probation"] = sum(uid > 3 for record in late for uid in record.peers)
        found[f"{name}: loss"] = world.held_out_loss() / without
        found[f"{name}: pay"] = sum(pay(world, range(4, 4 + len(crew))))
    return found


def tenfold(effort: int) -> Member:
    """Return a miner that sends honest updates of ten times their norm, which honest training could have."""
    return Scaled("tenfold norm", effort, 10.0)


LATE = LAUNCH + 2  # first window of late giants
TENFOLD = "5 miners of tenfold norm"


def giants(setting: Setting) -> Figures:
    """Simulate three honest miners alone, then with majorities that multiply honest updates."""

    def crew(count: int, scale: float, begin: int = 0) -> list[Member]:
        return [Scaled("giant", EFFORT, scale, begin=begin) for _ in range(count)]

    crews = {
        "5 norm giants of honest direction": crew(5, 1e6),
        "12 late norm giants of honest direction": crew(12, 1e6, LATE),
        TENFOLD: [tenfold(EFFORT) for _ in range(5)],
    }
    last = LATE + PROBATION + 8  # an honest miner that begins late has a place by then
    alone = live(network(setting, [Honest(EFFORT) for _ in range(3)]), last)
    found: Figures = {}
    for name, members in crews.items():
        world = live(network(setting, [*(Honest(EFFORT) for _ in range(3)), *members]), last)
        late = [record for record in world.records if record.window > LAUNCH]
        of_crew, of_honest = pay(world, range(4, 4 + len(members))), pay(world, (1, 2, 3))
        found[f"{name}: gathered after probation"] = sum(uid > 3 for record in late for uid in record.peers)
        found[f"{name}: loss"] = world.held_out_loss() / alone.held_out_loss()
        found[f"{name}: pay"] = sum(of_crew)
        found[f"{name}: over the least honest"] = ratio(mean(of_crew), min(of_honest))
    return found


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


TURN = LAUNCH + 8  # last honest window of turncoats


def turncoats(setting: Setting) -> Figures:
    """Simulate three honest miners, and five that turn harmful after they have earned their places."""
    members: list[Member] = [Honest(EFFORT) for _ in range(3)]
    members += [Turncoat("turncoat", EFFORT, TURN) for _ in range(5)]
    world = live(network(setting, members), TURN)
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
    members: list[Member] = [Honest(EFFORT) for _ in range(3)]
    members += [
        PeriodicTurncoat("periodic turncoat", EFFORT, TURN, harmful=HARMFUL, period=PAID_WINDOWS) for _ in range(5)
    ]
    world = live(network(setting, members), TURN)
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


def dormants(setting: Setting) -> Figures:
    """Simulate three honest miners, and five that harm in two of twenty windows and are late in the others."""
    members: list[Member] = [Honest(EFFORT) for _ in range(3)]
    members += [Dormant("dormant wrecker", 8, TURN) for _ in range(5)]
    world = live(network(setting, members), TURN + 3 * PAID_WINDOWS)
    harm = included_after_turn(world)
    return {
        "5 dormant wreckers: windows in which they harm": sum(harm),
        "5 dormant wreckers: windows in which they harm, at last": sum(harm[-PAID_WINDOWS:]),
    }


EQUALS, FEW = 7, 3  # miners of average and of little effort


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


READERS, NOT_TESTED = "trained on pages of tests", "trained on other pages"


def readers(setting: Setting) -> Figures:
    """Simulate miners that spend two thirds of their work on the pages by which others are tested.

    Single sequences of many pages help more than many of one page. So they are compared with miners that do the same
    with pages of which no gradient is taken.
    """
    members: list[Member] = [Honest(EFFORT) for _ in range(9)]
    members += [OthersPages(READERS, EFFORT, own=8) for _ in range(3)]
    members += [OthersPages(NOT_TESTED, EFFORT, own=8, assigned=False) for _ in range(3)]
    paid = pay(live(network(setting, members), LAUNCH + PAID_WINDOWS), range(1, len(members) + 1))
    honest, tested, not_tested = mean(paid[:9]), mean(paid[9:12]), mean(paid[12:])
    return {
        f"{READERS}: over as many other pages": ratio(tested, not_tested),
        f"{READERS}: over an equal miner": ratio(tested, honest),
        f"{NOT_TESTED}: over an equal miner": ratio(not_tested, honest),
    }


SIBLINGS = "trained on pages of siblings"
PAGES_OVERFITTER, OTHER_OVERFITTER = "overfitter of others' pages", "overfitter of other pages"


def siblings(setting: Setting) -> Figures:
    """Simulate five uids of one owner that train on each other's pages, and miners that overfit all miners' pages.

    Single sequences of many pages help more than many of one page. So both are compared with miners that do the same
    with pages of which no gradient is taken.
    """
    owned = range(11, 16)
    members: list[Member] = [Honest(8), *(Honest(EFFORT) for _ in range(3))]
    members += [PagesOverfitter(PAGES_OVERFITTER, EFFORT, own=8) for _ in range(2)]
    members += [PagesOverfitter(OTHER_OVERFITTER, EFFORT, own=8, assigned=False) for _ in range(2)]
    members += [OthersPages(NOT_TESTED, EFFORT, own=8, assigned=False) for _ in range(2)]
    members += [OthersPages(SIBLINGS, EFFORT, own=8, whose=owned) for _ in owned]
    world = live(network(setting, members), LAUNCH + PAID_WINDOWS)

    def paid(name: str) -> float:
        return mean(pay(world, [uid for uid, member in world.by_uid.items() if member.name == name]))

    least, equal = paid(members[0].name), paid(members[1].name)
    return {
        f"{PAGES_OVERFITTER}: over as many other pages": ratio(paid(PAGES_OVERFITTER), paid(OTHER_OVERFITTER)),
        f"{PAGES_OVERFITTER}: over an equal miner": ratio(paid(PAGES_OVERFITTER), equal),
        f"{PAGES_OVERFITTER}: over the least honest": ratio(paid(PAGES_OVERFITTER), least),
        f"{OTHER_OVERFITTER}: over an equal miner": ratio(paid(OTHER_OVERFITTER), equal),
        f"{SIBLINGS}: over as many other pages": ratio(paid(SIBLINGS), paid(NOT_TESTED)),
        f"{SIBLINGS}: over an equal miner": ratio(paid(SIBLINGS), equal),
        f"beside siblings, {NOT_TESTED}: over an equal miner": ratio(paid(NOT_TESTED), equal),
    }


def score_copiers(setting: Setting) -> Figures:
    """Simulate validators that copy the honest validator's weights, in a network whose pay changes.

    Weights are set every ``windows_per_weights`` windows; that is an epoch here.
    """
    members: list[Member] = [Honest(effort) for effort in HONEST]
    members += [GoDark("go dark", EFFORT, last=LAUNCH + 8), HalfAbsent("absent every second window", EFFORT)]
    members += [Turncoat("turncoat", EFFORT, TURN)]
    world = network(setting, members)
    live(world, LAUNCH + PAID_WINDOWS)
    epoch = world.hparams.windows_per_weights
    sealed, clear = (world.hparams.model_copy(update={"sealed_scores": one}) for one in (True, False))

    async def copied(hparams: HParams, **how: Any) -> list[Copied]:
        reports = [await world.comms.get_scores(VALIDATOR, record.window) for record in world.records]
        with tempfile.TemporaryDirectory() as folder:
            return await copied_weights(reports, hparams, world.signer, Path(folder), **how)

    found: Figures = {}
    for name, how in {
        "reports in the clear": {"hparams": clear, "reveal": 0, "late": False},
        "sealed reports": {"hparams": sealed, "reveal": 0, "late": False},
        "sealed reports, a block after weights in the clear": {"hparams": sealed, "reveal": 0, "late": True},
        "sealed reports and weights": {"hparams": sealed, "reveal": epoch, "late": True},
    }.items():
        epochs = [one for one in asyncio.run(copied(**how)) if one.age is not None]
        found[f"score copier, {name}: epochs old"] = min((one.age or 0) / epoch for one in epochs)
        found[f"score copier, {name}: overlap"] = mean([one.overlap for one in epochs])
    return found


SCENARIOS: dict[str, Scenario] = {
    "crowd": Scenario(crowd, 60.0, by_pages=True),
    "twins": Scenario(twins, 35.0, by_pages=True),
    "split 8": Scenario(lambda setting: split(setting, 8), 45.0),
    "split 64": Scenario(lambda setting: split(setting, 64), 70.0),
    "split 64, tenfold norm": Scenario(lambda one: split(one, 64, tenfold_parts, f"{SPLIT}, tenfold norm"), 70.0),
    "dealt": Scenario(lambda setting: split(setting, 64, dealt, "dealt over 8 uids"), 55.0),
    "wreckers": Scenario(wreckers, 38.0),
    "giants": Scenario(giants, 45.0),
    "losses": Scenario(losses, 10.0),
    "turncoats": Scenario(turncoats, 10.0),
    "periodic turncoats": Scenario(periodic_turncoats, 22.0),
    "dormants": Scenario(dormants, 40.0),
    "norms": Scenario(norms, 55.0, by_pages=True),
    "readers": Scenario(readers, 30.0, by_pages=True),
    "siblings": Scenario(siblings, 30.0, by_pages=True),
    "score copiers": Scenario(score_copiers, 15.0),
}
