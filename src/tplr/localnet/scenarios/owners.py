"""Owners of several uids: copies of one update, parts of one work, and miners that train on each other's pages."""

from collections.abc import Callable, Iterable, Sequence

from tplr.localnet.attackers import Dealt, Honest, InTurns, Pooled, Twin
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
from tplr.localnet.simulation import Member, World
from tplr.schemas import PeerScore

HONEST, UIDS = 4, 8  # number of honest miners beside identical updates, and of uids of an owner with several
SPLIT = "split over 8 uids"
IN_TURNS = "identical, two of 4 uids in turns"
Owner = Callable[[int, Sequence[int]], list[Member]]


def twins(setting: Setting) -> Figures:
    """Simulate four honest miners, and two owners of eight uids that send identical or near-identical updates."""
    same, near = HONEST + 1, HONEST + 1 + UIDS
    members: list[Member] = [Honest(EFFORT) for _ in range(HONEST)]
    members += [Twin("identical", same, EFFORT) for _ in range(UIDS)]
    members += [Twin("near-identical", near, EFFORT, noise=0.3, own_indices=0.1) for _ in range(UIDS)]
    world = live(network(setting, members), LAUNCH + PAID_WINDOWS)
    equal = mean(pay(world, range(1, same)))
    return {
        "identical over 8 uids": ratio(sum(pay(world, range(same, near))), equal),
        "near-identical over 8 uids": ratio(sum(pay(world, range(near, near + UIDS))), equal),
    }


MUCH = 64  # sequences of one work on the pages of all of an owner's uids
NOISY = {
    "one update on pages of 8 uids, little noise": (0.3, 0.1),
    "one update on pages of 8 uids, much noise": (1.0, 0.5),
}


def noisy(setting: Setting) -> Figures:
    """Simulate four honest miners, and two owners of eight uids that train once, on pages of all of their uids.

    Each uid sends the update with noise of its own: little or much. So each passes its own-pages test in part.
    """
    members: list[Member] = [Honest(MUCH) for _ in range(HONEST)]
    owned: dict[str, range] = {}
    for name, (noise, own_indices) in NOISY.items():
        owned[name] = range(len(members) + 1, len(members) + 1 + UIDS)
        first = owned[name][0]
        members += [
            Twin(name, first, MUCH, noise=noise, own_indices=own_indices, pages_of=owned[name]) for _ in range(UIDS)
        ]
    world = live(network(setting, members), LAUNCH + PAID_WINDOWS)
    equal = mean(pay(world, range(1, HONEST + 1)))
    return {name: ratio(sum(pay(world, uids)), equal) for name, uids in owned.items()}


def in_turns(setting: Setting) -> Figures:
    """Simulate seven honest miners, and an owner of four uids, of which two in each window send one work.

    Who is absent that often is measured for long before it has a place, so the run is longer than others.
    """
    honest, uids = range(1, 8), range(8, 12)
    first = InTurns("in turns", EFFORT, uids, at_once=2)
    members: list[Member] = [Honest(EFFORT) for _ in honest]
    members += [first, *(InTurns("in turns", EFFORT, uids, at_once=2, first=first) for _ in uids[1:])]
    world = live(network(setting, members), LAUNCH + 2 * PAID_WINDOWS)
    return {IN_TURNS: ratio(sum(pay(world, uids)), mean(pay(world, honest)))}


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


def pooled(effort: int, uids: Sequence[int]) -> list[Member]:
    """Return an owner whose uids send their part and, as far as credit takes nothing, a share of all others'."""
    owned: list[Pooled] = []
    return [Pooled("pooled", effort // len(uids), owned, others=0.15) for _ in uids]


def split(setting: Setting, effort: int, owner: Owner = honest_parts, what: str = SPLIT) -> Figures:
    """Simulate an owner that splits ``effort`` sequences over eight uids, with three and with nine honest miners.

    Each honest miner has ``effort`` sequences. With SparseLoCo a step is clipped to the norm cap, which the owner
    can lower with more than three quarters of the set.

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
