"""All penalties in one table: the condition of each rule, and its factor.

A rule that strikes multiplies the miner's multiplier for that rule by its factor, at most once per window. A multiplier
returns to 1 at the next evaluation. A rule that could not be tested changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tplr.hparams import HParams
from tplr.schemas import OUT_OF_SYNC, UNREAD, DocumentedScore, PeerObservation, Reason

# Returns whether a rule strikes; None if it could not be tested.
Test = Callable[[PeerObservation, HParams], bool | None]


@dataclass(frozen=True)
class Rule:
    """One penalty.

    Attributes:
        code: its name in reports.
        meaning: the miner's breach in words, for readers of reports.
        factor: factor of its multiplier.
        test: the reasons of refusal for which the rule strikes, or a function.
        binary: whether the binary average is multiplied too.
    """

    code: str
    meaning: str
    factor: float
    test: tuple[Reason, ...] | Test
    binary: bool = False

    def strikes(self, seen: PeerObservation, hparams: HParams) -> bool | None:
        """Return whether the rule strikes; None if it could not be tested."""
        if callable(self.test):
            return self.test(seen, hparams)
        return None if seen.verdict in (None, Reason.UNAVAILABLE) else seen.verdict in self.test


def _copied_indices(seen: PeerObservation, _: HParams) -> bool | None:
    return None if seen.copied is None else seen.copied == "copied_indices"


def _out_of_sync(seen: PeerObservation, hparams: HParams) -> bool | None:
    if seen.behind is None:
        return None
    return seen.behind in (OUT_OF_SYNC, UNREAD) or seen.behind > hparams.sync_max_steps_behind


def _inactive(seen: PeerObservation, _: HParams) -> bool | None:
    return None if seen.active is None else not seen.active


RULES = (
    Rule("missing", "no update by the end of the time bound", 0.75, (Reason.MISSING,)),
    Rule("late", "its update came after the time bound", 0.75, (Reason.TOO_LATE,)),
    Rule("early", "its update was readable before the window ended", 0.75, (Reason.TOO_EARLY,)),
    Rule(
        "no_commit",
        "no hash, or not its update's, was published before the window ended",
        0.75,
        (Reason.NO_COMMIT, Reason.HASH_MISMATCH),
    ),
    Rule("wrong_size", "its update does not have the size of an update", 0.0, (Reason.WRONG_SIZE,)),
    Rule("malformed", "its update can't be decoded, or is empty", 0.0, (Reason.MALFORMED, Reason.EMPTY)),
    Rule("unreadable", "its commitment on chain opens no bucket", 0.75, (Reason.NO_BUCKET, Reason.DENIED)),
    Rule("copied_indices", "its update repeats the coordinates of another one", 0.5, _copied_indices),
    Rule("out_of_sync", "it reports another model, or none", 0.75, _out_of_sync, binary=True),
    Rule("inactive", "it has no recent upload; after enough windows its score is reset", 0.75, _inactive),
)

BY_CODE = {rule.code: rule for rule in RULES}


def strike(
    seen: PeerObservation, peer_score: DocumentedScore, hparams: HParams, *, evaluated: bool
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the multipliers below 1 after a window, and the codes of the rules that struck in it."""
    multipliers, struck = {}, []
    for rule in RULES:
        multiplier = 1.0 if evaluated else peer_score.multipliers.get(rule.code, 1.0)
        if rule.strikes(seen, hparams):
            multiplier *= rule.factor
            struck.append(rule.code)
        if multiplier < 1:
            multipliers[rule.code] = multiplier
    return multipliers, tuple(struck)
