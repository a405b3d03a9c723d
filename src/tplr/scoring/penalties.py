"""Rules by which a window counts zero for a miner that sent an update, or that claims to follow the model.

Every breach is found in the window in which it happens, so it never pays, and no factor is needed beyond the zero. A
struck miner is also removed from the peer list. A miner without a timely update or without a commit breaks no rule: it
counts as absent, like an honest miner that crashed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tplr.schemas import OUT_OF_SYNC, UNREAD, VALID, Alignment, Evidence, PeerObservation, Reason


@dataclass(frozen=True)
class Seen:
    """Input of the rules: the observation, and whether the update's norm is above the largest honest one."""

    observation: PeerObservation
    outsized: bool
    max_behind: int


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        code: its name in reports.
        meaning: the miner's breach in words, for readers of reports.
        test: the reasons of refusal for which the rule strikes, or a function.
    """

    code: str
    meaning: str
    test: tuple[Reason, ...] | Callable[[Seen], bool]

    def strikes(self, seen: Seen) -> bool:
        """Return whether the rule strikes."""
        if callable(self.test):
            return self.test(seen)
        return seen.observation.verdict in self.test


def _wrong_pages(seen: Seen) -> bool:
    return seen.observation.assigned_pages is False


def _outsized(seen: Seen) -> bool:
    return seen.outsized


def _out_of_sync(seen: Seen) -> bool:
    # A miner that sends no update is absent, so its reports do not matter.
    behind = seen.observation.behind if seen.observation.verdict == VALID else None
    return behind is not None and (behind in (OUT_OF_SYNC, UNREAD) or behind > seen.max_behind)


RULES = (
    Rule("wrong_size", "its update does not have the size of an update", (Reason.WRONG_SIZE,)),
    Rule("malformed", "its update can't be decoded", (Reason.MALFORMED,)),
    Rule("empty", "every value of its update is zero", (Reason.EMPTY,)),
    Rule("wrong_pages", "its update is not for its assigned pages", _wrong_pages),
    Rule("outsized", "its update's norm is larger than training explains", _outsized),
    Rule("out_of_sync", "it reports another model, is too far behind, or its report can't be read", _out_of_sync),
)

BY_CODE = {rule.code: rule for rule in RULES}


def strikes(evidence: Evidence, *, max_behind: int) -> dict[int, tuple[str, ...]]:
    """Return the codes of the rules that struck in a window, by uid.

    Args:
        max_behind: number of steps; a miner that is further behind is out of sync.
    """
    above, found = _outsized_uids(evidence.alignment), {}
    for key, observation in evidence.observations.items():
        seen = Seen(observation, int(key) in above, max_behind)
        if codes := tuple(rule.code for rule in RULES if rule.strikes(seen)):
            found[int(key)] = codes
    return dict(sorted(found.items()))


def _outsized_uids(alignment: Alignment | None) -> set[int]:
    """Return the uids of updates whose norm is above the largest honest one.

    That norm follows from hparams and the validator's gradient, so nobody's updates change it. Measured honest norms
    are in docs/benchmarks/honest_norms.csv.
    """
    if alignment is None or alignment.largest_norm is None:
        return set()
    return {uid for uid, norm in zip(alignment.uids, alignment.norms, strict=True) if norm > alignment.largest_norm}
