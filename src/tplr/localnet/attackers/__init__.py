"""Miners of a simulation: honest ones that train on different amounts of data, and one miner for each known attack."""

from tplr.localnet.attackers.copies import Copier, Dealt, InTurns, Pooled, Twin
from tplr.localnet.attackers.damaged import Malformed, malformed
from tplr.localnet.attackers.honest import Cheat, Honest, Lossy
from tplr.localnet.attackers.pages import Crowder, OthersPages, Overfitter, PagesOverfitter, WrongPages
from tplr.localnet.attackers.presence import (
    Dormant,
    GoDark,
    HalfAbsent,
    HidingTurncoat,
    Late,
    PeriodicTurncoat,
    Timed,
    Turncoat,
)
from tplr.localnet.attackers.sync import NoProof, OutOfSync
from tplr.localnet.attackers.values import Changed, Noise, PlainGradient, Repeater, Scaled, Zeros

__all__ = [
    "Changed",
    "Cheat",
    "Copier",
    "Crowder",
    "Dealt",
    "Dormant",
    "GoDark",
    "HalfAbsent",
    "HidingTurncoat",
    "Honest",
    "InTurns",
    "Late",
    "Lossy",
    "Malformed",
    "NoProof",
    "Noise",
    "OthersPages",
    "OutOfSync",
    "Overfitter",
    "PagesOverfitter",
    "PeriodicTurncoat",
    "PlainGradient",
    "Pooled",
    "Repeater",
    "Scaled",
    "Timed",
    "Turncoat",
    "Twin",
    "WrongPages",
    "Zeros",
    "malformed",
]
