"""Rules by which a window counts zero for a miner that sent an update, or that claims to follow the model.

Every breach is found in the window in which it happens, so it never pays, and no factor is needed beyond the zero. A
struck miner is also removed from the peer list. A miner without a timely update or without a commit breaks no rule: it
counts as absent, like an honest miner that crashed.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tplr.schemas import OUT_OF_SYNC, UNREAD, VALID, Evidence, PeerObservation, Reason

# An update whose norm exceeds this multiple of the usual one is no work of this model.
NORM_LIMIT = 30.0
# Norms below this share of the largest honest one are allowed, however small the others' are. Honest norms of up to 0.3
# of it were measured (docs/benchmarks/scoring.md).
ALLOWED_SHARE = 1 / 3


@dataclass(frozen=True)
class Seen:
    """Input of the rules: the observation, and whether the update's norm is above ``norm_limit``."""

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


def norm_limit(evidence: Evidence) -> float | None:
    """Return the norm above which an update is ``outsized``; None if none is known.

    It is ``NORM_LIMIT`` times the median of the included updates, because anybody can send any number of updates on
    probation. But half of the included ones may be tiny, or giants. So it is at most the largest norm that honest
    training can have, also while no update is included, and at least ``ALLOWED_SHARE`` of it.

    A scheme without such a bound scales all norms. There the limit is unknown while no update is included, and the
    median counts as no smaller than the lower quartile of all updates.
    """
    if evidence.alignment is None:
        return None
    norms, largest = norms_of(evidence), evidence.alignment.largest_norm
    included = [norm for uid, norm in norms.items() if (one := evidence.observations.get(str(uid))) and one.included]
    if not included:
        return largest
    median = statistics.median_low(included)
    if largest is not None:
        return min(largest, max(NORM_LIMIT * median, ALLOWED_SHARE * largest))
    return NORM_LIMIT * max(median, sorted(norms.values())[math.ceil(len(norms) / 4) - 1]) or None


def strikes(evidence: Evidence, *, max_behind: int) -> dict[int, tuple[str, ...]]:
    """Return the codes of the rules that struck in a window, by uid.

    Args:
        max_behind: number of steps; a miner that is further behind is out of sync.
    """
    limit = norm_limit(evidence)
    above = {uid for uid, norm in norms_of(evidence).items() if limit is not None and norm > limit}
    found = {}
    for key, observation in evidence.observations.items():
        seen = Seen(observation, int(key) in above, max_behind)
        if codes := tuple(rule.code for rule in RULES if rule.strikes(seen)):
            found[int(key)] = codes
    return dict(sorted(found.items()))


def norms_of(evidence: Evidence) -> dict[int, float]:
    """Return each measured update's norm, by uid."""
    aligned = evidence.alignment
    return {} if aligned is None else dict(zip(aligned.uids, aligned.norms, strict=True))
