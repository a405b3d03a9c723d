"""The included set that a single elector would publish."""

from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.gather import GatherResult
from tplr.keys import version_at


def included_set(gathered: GatherResult, version: str) -> IncludedSet:
    """Return the included set of the gathered updates."""
    updates, skipped = gathered.updates, gathered.skipped
    return IncludedSet(
        window=gathered.window,
        version=version_at(version, gathered.window),
        included=tuple(Included(uid=one.uid, sha256=one.sha256, size=one.size) for one in updates),
        skipped={str(uid): why for uid, why in skipped.items()},
        success_rate=len(updates) / (len(updates) + len(skipped)) if updates else 0.0,
    )
