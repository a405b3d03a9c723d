"""Places: which miners the evidence proves to help the model, and why others have no place on the peer list."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tplr.schemas import PeerScore
from tplr.scoring.credit import CHANCE
from tplr.scoring.measured_window import MeasuredWindow
from tplr.scoring.overshoot import Middle, middles

# Fewest measured windows after which a mean predicted gain beyond chance proves a miner: one window has no spread.
PROVING_WINDOWS = 2
# A mean predicted gain above this many standard errors proves a miner. It is higher than ``CHANCE``, because every
# window is a new chance for miners that send noise to exceed ``CHANCE``. Below ``CHANCE`` a miner is a known zero; in
# between, a listed miner keeps its place.
PROVEN = 4.0
# Number of own-pages tests after which a factor of 0 means that a miner does not train on its own pages, and number of
# measured windows after which harm on held-out pages counts.
DISPROVING_TESTS = 8
# A miner's spread by which harm is judged is at most this many times the usual one.
MOST_SPREAD = 3.0


class Place(NamedTuple):
    """The judgement of a miner.

    Attributes:
        proven: whether it helps the model and no test shows that it repeats another's work; None if unknown. False also
            for a miner that can't be judged because it sends too seldom: it would keep its place, or be on probation
            before others that can be.
        reason: in words.
    """

    proven: bool | None
    reason: str


class _Limits(NamedTuple):
    """What all miners are judged by: numbers of windows, a spread, and their gains in the middle, by uid."""

    fewest: int
    most_spread: float
    middle: Mapping[int, Middle]


def places(
    windows: Sequence[MeasuredWindow], scores: Mapping[int, PeerScore], probation_windows: int
) -> dict[int, Place]:
    """Judge the miners that have ``scores`` after the last of ``windows``; return the judgements by uid.

    Args:
        windows: the evidence of the scores, ascending.
        probation_windows: of hparams.
    """
    fewest = max(PROVING_WINDOWS, probation_windows)
    most_spread = MOST_SPREAD * _usual_spread(scores)
    middle = middles(windows, {uid: score.hotkey for uid, score in scores.items()})
    limits = _Limits(fewest, most_spread, middle)
    return {uid: _place(windows, uid, score, limits) for uid, score in scores.items()}


def _place(windows: Sequence[MeasuredWindow], uid: int, score: PeerScore, limits: _Limits) -> Place:
    fewest, most_spread, middle = limits
    if any(one.applied_unmeasured(uid, score.hotkey) for one in windows):
        return Place(False, "it named other pages than assigned in an applied update, so nobody measured this update")
    if score.measured < fewest:
        if (missed := _missed(windows, uid, score)) >= fewest:
            return Place(False, f"{missed} updates are missing, and only {score.measured} were measured")
        return Place(None, f"{score.measured} updates were measured: it is judged from {fewest} on")
    objections = {
        f"its mean cosine is not above {CHANCE:g} standard errors": score.mean <= CHANCE * score.error,
        f"its own-pages factor is 0 after {score.tests} tests": score.own_pages <= 0
        and score.tests >= DISPROVING_TESTS,
        "some of its updates in succession increased the loss": _harms(windows, uid, score, fewest, most_spread),
        "its updates increase the loss on held-out pages": _harms_held_out(windows, uid, score),
        "its steps overshoot: in the middle of the window's step their gain is gone": middle[uid].overshoots,
    }
    if found := [reason for reason, holds in objections.items() if holds]:
        return Place(False, "; ".join(found))
    doubts = {
        f"its mean cosine is between {CHANCE:g} and {PROVEN:g} standard errors": score.mean <= PROVEN * score.error,
        f"its own-pages factor is 0 after {score.tests} tests": score.own_pages <= 0 < score.tests,
    }
    if found := [reason for reason, holds in doubts.items() if holds]:
        return Place(None, f"{'; '.join(found)}: a listed miner stays, and others wait")
    return Place(True, f"its mean cosine is above {PROVEN:g} standard errors")


def _missed(windows: Sequence[MeasuredWindow], uid: int, score: PeerScore) -> int:
    """Return in how many windows its update was requested, and missing or refused, while others were measured."""
    return sum(bool(one.gains) and one.would_count(uid, score.hotkey) is False for one in windows)


def _harms(windows: Sequence[MeasuredWindow], uid: int, score: PeerScore, fewest: int, most_spread: float) -> bool:
    """Return whether some of its updates in succession increased the loss beyond chance, regardless of the others.

    Updates that break a rule count, too: they may be applied. Chance is measured by a miner's own spread, but not by
    far more than the usual one: a miner that alternates has a large spread. Windows with a ``shock`` count only while
    they are the newest: otherwise nobody would have a place for ``pay_windows`` windows.
    """
    gains = [(one, gain) for one in windows if (gain := one.effect(uid, score.hotkey)) is not None]
    calm = [gain for one, gain in gains if not one.shock]
    newest = [gain for _, gain in gains[-fewest:]]
    lengths = range(PROVING_WINDOWS, fewest + 1)
    runs = [calm[start : start + length] for length in lengths for start in range(len(calm) - length + 1)]
    spread = min(_spread(score), most_spread)
    return any(math.fsum(run) < -CHANCE * spread * math.sqrt(len(run)) for run in (newest, *runs))


def _usual_spread(scores: Mapping[int, PeerScore]) -> float:
    """Return the median spread of a measured cosine; infinite if there is no miner to measure it.

    Only miners that are applied and help beyond chance set it: anybody can have many on probation.
    """
    helpful = [_spread(one) for one in scores.values() if one.presence > 0 and one.mean > CHANCE * one.error]
    return statistics.median(helpful) if helpful else math.inf


def _spread(score: PeerScore) -> float:
    """Return the standard deviation of a measured cosine."""
    return score.error * math.sqrt(score.measured)


def _harms_held_out(windows: Sequence[MeasuredWindow], uid: int, score: PeerScore) -> bool:
    """Return whether its updates increase the loss on held-out pages beyond chance, whatever they gain on others.

    They may help on most miners' pages, and do harm on a few.
    """
    cosines = [one.held_out_effect(uid, score.hotkey) for one in windows]
    known = [one for one in cosines if one is not None]
    if len(known) < DISPROVING_TESTS:
        return False
    error = statistics.stdev(known) / math.sqrt(len(known))
    return statistics.fmean(known) < -CHANCE * error
