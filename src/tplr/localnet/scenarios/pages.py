"""Miners that train on the pages by which others are tested."""

from tplr.localnet.attackers import Crowder, Honest, OthersPages, PagesOverfitter
from tplr.localnet.scenarios.base import EFFORT, LAUNCH, PAID_WINDOWS, Figures, Setting, live, mean, network, pay, ratio
from tplr.localnet.simulation import Member

READERS, NOT_TESTED = "trained on pages of tests", "trained on other pages"
SIBLINGS = "trained on pages of siblings"
PAGES_OVERFITTER, OTHER_OVERFITTER = "overfitter of others' pages", "overfitter of other pages"


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


VICTIM, CROWDERS = "victim of ten crowders", "ten crowders"
LISTED_VICTIM, LISTED = "victim of four listed crowders", "four listed crowders"


def crowders(setting: Setting) -> Figures:
    """Simulate six equal miners, and ten newcomers that train on the pages of one of them to hide its training."""
    victim, begin = 1, LAUNCH + 2
    crew = [Crowder("crowder", EFFORT, victim, begin=begin) for _ in range(10)]
    world = live(network(setting, [*(Honest(EFFORT) for _ in range(6)), *crew]), begin + PAID_WINDOWS)
    honest, crowd = pay(world, range(1, 7)), pay(world, range(7, 17))
    return {
        f"{VICTIM}: over an equal miner": ratio(honest[0], mean(honest[1:])),
        f"{CROWDERS}: over an equal miner": ratio(mean(crowd), mean(honest[1:])),
    }


def listed_crowders(setting: Setting) -> Figures:
    """Simulate six equal miners, and four that spend two thirds of their work on the pages of one of them."""
    crew = [Crowder("listed crowder", EFFORT, 1, own=8) for _ in range(4)]
    world = live(network(setting, [*(Honest(EFFORT) for _ in range(6)), *crew]), LAUNCH + PAID_WINDOWS)
    honest, crowd = pay(world, range(1, 7)), pay(world, range(7, 11))
    return {
        f"{LISTED_VICTIM}: over an equal miner": ratio(honest[0], mean(honest[1:])),
        f"{LISTED}: over an equal miner": ratio(mean(crowd), mean(honest[1:])),
    }


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
