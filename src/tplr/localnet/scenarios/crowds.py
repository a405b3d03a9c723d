"""One attacker of each kind among honest miners of three efforts."""

from tplr.localnet.attackers import (
    Changed,
    Copier,
    GoDark,
    HalfAbsent,
    Honest,
    Late,
    Malformed,
    Noise,
    NoProof,
    OutOfSync,
    Overfitter,
    Repeater,
    Scaled,
    Timed,
    WrongPages,
    Zeros,
)
from tplr.localnet.scenarios.base import EFFORT, PAID_WINDOWS, Figures, Setting, live, mean, network, pay, ratio
from tplr.localnet.simulation import Member

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


def crowd(setting: Setting, tests: int | None = None) -> Figures:
    """Simulate honest miners of three efforts with one attacker of each kind, with ``tests`` tests in a window."""
    members = [*map(Honest, HONEST), *cheats()]
    world = live(network(setting, members, tests=tests), DARK + PAID_WINDOWS)
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
