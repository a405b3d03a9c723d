"""All penalties in one table: when a rule strikes, its factor, and how a miner recovers.

A rule that strikes multiplies the miner's multiplier of that rule by its factor, at most once a window. If a rule was
tested and did not strike, a hardened multiplier rises by ``1 / recovery``, up to 1. A documented one returns to 1 with
the next evaluation. A rule that could not be tested changes nothing. A multiplier is never above 1, so no penalty
raises a score.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tplr.hparams import HParams
from tplr.schemas import OUT_OF_SYNC, VALID, PeerObservation, PeerScore, Reason
from tplr.seeds import Profile

# Number of last gradient scores whose signs are tested for persistent negatives.
REMEMBERED_SIGNS = 8
# An update with a norm above this many times the window's median is no gradient of this model.
NORM_LIMIT = 30.0


# Whether a rule strikes; None if it could not be tested. The peer score is the one after this window's evaluation.
Test = Callable[[PeerObservation, PeerScore, HParams], bool | None]


@dataclass(frozen=True)
class Rule:
    """One penalty.

    Attributes:
        code: its name in reports.
        meaning: what the miner did, for readers of reports.
        documented, hardened: the factor in that profile; None if the profile lacks the rule.
        recovery: windows in which a hardened multiplier rises from 0 to 1.
        test: the reasons of refusal for which the rule strikes, or a function.
        documented_binary: whether the documented profile multiplies the binary average too.
    """

    code: str
    meaning: str
    documented: float | None
    hardened: float
    recovery: int
    test: tuple[Reason, ...] | Test
    documented_binary: bool = False

    def factor(self, profile: Profile) -> float | None:
        """The factor in a profile, or None."""
        return self.documented if profile == "documented" else self.hardened

    def strikes(self, seen: PeerObservation, peer_score: PeerScore, hparams: HParams) -> bool | None:
        """Whether the rule strikes; None if it could not be tested."""
        if callable(self.test):
            return self.test(seen, peer_score, hparams)
        return None if seen.verdict in (None, Reason.UNAVAILABLE) else seen.verdict in self.test


def refused(seen: PeerObservation) -> bool:
    """Whether a miner that was to be evaluated sent no valid update of its own, by its own fault."""
    no_update = seen.verdict is not None and seen.verdict not in (VALID, Reason.UNAVAILABLE)
    return seen.chosen and (no_update or seen.own_pages is False)


def _copied_indices(seen: PeerObservation, _: PeerScore, __: HParams) -> bool | None:
    return None if seen.copied is None else seen.copied == "copied_indices"


def _stale(seen: PeerObservation, _: PeerScore, __: HParams) -> bool | None:
    return None if seen.copied is None else seen.copied == "stale"


def _out_of_sync(seen: PeerObservation, _: PeerScore, hparams: HParams) -> bool | None:
    if seen.behind is None:
        return None
    return seen.behind == OUT_OF_SYNC or seen.behind > hparams.sync_max_steps_behind


def _wrong_pages(seen: PeerObservation, _: PeerScore, __: HParams) -> bool | None:
    return None if seen.own_pages is None else not seen.own_pages


def _outsized(seen: PeerObservation, _: PeerScore, __: HParams) -> bool | None:
    return None if seen.norm_ratio is None else seen.norm_ratio > NORM_LIMIT


def _inactive(seen: PeerObservation, _: PeerScore, __: HParams) -> bool | None:
    return None if seen.active is None else not seen.active


def _negatives(seen: PeerObservation, peer_score: PeerScore, _: HParams) -> bool | None:
    """Whether more than half of the last evaluations made the model worse; tested with each new evaluation."""
    if (seen.evaluation is None and not refused(seen)) or len(peer_score.signs) < REMEMBERED_SIGNS:
        return None
    return sum(sign < 0 for sign in peer_score.signs) > REMEMBERED_SIGNS // 2


RULES = (
    Rule("missing", "no update was there when the time bound passed", 0.75, 0.75, 20, (Reason.MISSING,)),
    Rule("late", "its update came after the time bound", 0.75, 0.75, 20, (Reason.TOO_LATE,)),
    Rule("early", "its update was readable before the window ended", 0.75, 0.75, 20, (Reason.TOO_EARLY,)),
    Rule(
        "no_commit",
        "no hash was published before the window ended, or not that of its update",
        0.75,
        0.5,
        20,
        (Reason.NO_COMMIT, Reason.HASH_MISMATCH),
    ),
    Rule("wrong_size", "its update has not the size that all updates have", 0.0, 0.5, 20, (Reason.WRONG_SIZE,)),
    Rule("malformed", "its update can't be decoded", 0.0, 0.5, 20, (Reason.MALFORMED,)),
    Rule("unreadable", "what it committed on chain opens no bucket", 0.75, 0.75, 20, (Reason.NO_BUCKET, Reason.DENIED)),
    Rule("wrong_pages", "its update names other pages than it was given", None, 0.5, 20, _wrong_pages),
    Rule("copied_indices", "its update has the coordinates of another one", 0.5, 0.25, 40, _copied_indices),
    Rule("stale", "its update repeats one of an earlier window", None, 0.25, 40, _stale),
    Rule("outsized", "its update is far larger than all others", None, 0.5, 20, _outsized),
    Rule("out_of_sync", "it reports another model, or none", 0.75, 0.75, 20, _out_of_sync, documented_binary=True),
    Rule("inactive", "it uploaded nothing lately; in the end all it earned is forgotten", 0.75, 0.75, 20, _inactive),
    Rule("negatives", "most of its last updates made the model worse", None, 0.25, 20, _negatives),
)

BY_CODE = {rule.code: rule for rule in RULES}


def strike(
    profile: Profile, seen: PeerObservation, peer_score: PeerScore, hparams: HParams, *, evaluated: bool
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The multipliers below 1 after a window, and the codes of the rules that struck in it."""
    multipliers, struck = {}, []
    for rule in RULES:
        factor = rule.factor(profile)
        if factor is None:
            continue
        multiplier = peer_score.multipliers.get(rule.code, 1.0)
        found = rule.strikes(seen, peer_score, hparams)
        if profile == "documented" and evaluated:
            multiplier = 1.0
        elif profile == "hardened" and found is False:
            multiplier = min(1.0, multiplier + 1 / rule.recovery)
        if found:
            multiplier *= factor
            struck.append(rule.code)
        if multiplier < 1:
            multipliers[rule.code] = multiplier
    return multipliers, tuple(struck)
