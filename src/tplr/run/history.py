"""Reads the history of a run's windows from public buckets: contributors, their tokens, and the loss."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import read_prologue
from tplr.errors import ObjectNotFound, ObjectTooLarge, PayloadError, StoreError, StoreUnavailable
from tplr.exchange.aggregates import Included
from tplr.logging import logger
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import published_windows
from tplr.node.uid_owners import MAX_HOTKEY, uid_owners
from tplr.node.windows import published_report
from tplr.run.record import Contributor, WindowFacts
from tplr.schemas import PeerScore, ScoreReport
from tplr.storage.many import for_each

WINDOWS_AT_ONCE = 8


class RunHistory(NamedTuple):
    """The windows with any published record, the contributors, and the window whose scores give their credit."""

    windows: tuple[WindowFacts, ...]
    contributors: tuple[Contributor, ...]
    credit_window: int | None


class WindowRead(NamedTuple):
    """What was read of a window.

    Attributes:
        hotkeys: of the uids with an included update, at the window's end; "" if it is not known.
        scores: None without a readable report.
    """

    facts: WindowFacts
    hotkeys: dict[str, str]
    scores: ScoreReport | None


async def read_history(network: NetworkReader, spec: PayloadSpec, windows: range) -> RunHistory:
    """Read the history of these windows: requests only for those of which a validator's bucket has something.

    Raises:
        ChainError, StoreError.
    """

    async def read(window: int) -> WindowRead | None:
        return await _window(network, spec, window)

    published = await _published_windows(network, windows)
    found = [one for one in await for_each(published, read, concurrency=WINDOWS_AT_ONCE) if one]
    batch_tokens = network.hparams.batch_size * network.hparams.sequence_length
    credit_window = next((one.facts.window for one in reversed(found) if one.scores), None)
    return RunHistory(tuple(one.facts for one in found), contributors(found, batch_tokens), credit_window)


def contributors(windows: Sequence[WindowRead], batch_tokens: int) -> tuple[Contributor, ...]:
    """Return the participants whose updates are included in these windows, by uid.

    A uid that changed hands is several participants, in their order. The last score report has the credits.

    Args:
        windows: ascending.
        batch_tokens: number of tokens of a batch.
    """
    scores = next((one.scores.peer_scores for one in reversed(windows) if one.scores), {})
    batches: dict[tuple[str, str], list[int | None]] = {}
    for one in windows:
        for uid, number in one.facts.batches.items():
            batches.setdefault((uid, one.hotkeys[uid]), []).append(number)
    found = []
    for (uid, hotkey), numbers in batches.items():
        score = scores.get(uid)
        own = score if isinstance(score, PeerScore) and score.hotkey[:MAX_HOTKEY] == hotkey != "" else None
        found.append(
            Contributor(
                uid=int(uid),
                hotkey=hotkey,
                windows=len(numbers),
                tokens=batch_tokens * sum(number or 0 for number in numbers),
                credit=own.credit if own else None,
            )
        )
    return tuple(sorted(found, key=lambda one: one.uid))


async def _published_windows(network: NetworkReader, windows: range) -> list[int]:
    """List, ascending, those of ``windows`` of which validators' buckets have a report, a decision or scores.

    Raises:
        StoreError: the buckets of the leading validator, or of electors with half of the stake, can't be listed.
    """
    leader, electors = network.validator(), network.comms.electors
    listed: dict[int, set[int]] = {}

    async def list_windows(uid: int) -> StoreError | None:
        kinds = ("debug", "aggregator", "scores") if uid == leader else ("debug", "aggregator")
        try:
            found = [await published_windows(network, uid, kind) for kind in kinds]
        except StoreError as error:
            logger.warning("the bucket of validator %d can't be listed: %s", uid, error)
            return error
        listed[uid] = set[int]().union(*found)
        return None

    problems = await for_each(network.comms.validators(), list_windows, concurrency=WINDOWS_AT_ONCE)
    problem = next(filter(None, problems), None)
    if problem and not (leader in listed and electors.outweighs(listed)):
        raise problem
    return sorted(window for window in set[int]().union(*listed.values()) if window in windows)


async def _window(network: NetworkReader, spec: PayloadSpec, window: int) -> WindowRead | None:
    report, scores = await published_report(network.comms, window), await _scores(network, window)
    published = await _published(network, window)
    if report is None and scores is None and published is None:
        return None
    included = [int(uid) for uid in report.included] if report else [one.uid for one in published or ()]
    facts = WindowFacts(
        window=window,
        fingerprint=report.fingerprint if report else "",
        batches={str(uid): await _batches(network, spec, window, uid) for uid in sorted(included)},
        held_out_loss=scores.held_out_loss if scores else None,
    )
    return WindowRead(facts, await _hotkeys(network, window, scores, facts.batches), scores)


async def _hotkeys(
    network: NetworkReader, window: int, scores: ScoreReport | None, uids: Iterable[str]
) -> dict[str, str]:
    """Return the hotkeys of these uids, "" for one that is not known. Raises ChainUnavailable."""
    known = await uid_owners(network.comms, window, scores)
    return {uid: known.get(int(uid), "")[:MAX_HOTKEY] for uid in uids}


async def _published(network: NetworkReader, window: int) -> tuple[Included, ...] | None:
    try:
        published = await network.comms.get_included(window)
    except PayloadError:
        return None
    return published.included if published else None


async def _scores(network: NetworkReader, window: int) -> ScoreReport | None:
    try:
        return await network.comms.get_scores(network.validator(), window)
    except (ObjectNotFound, ObjectTooLarge, PayloadError):  # not scored, sealed, deleted, or not a report
        return None


async def _batches(network: NetworkReader, spec: PayloadSpec, window: int, uid: int) -> int | None:
    """Return the number of batches in an included update's header; None if the update is deleted or not readable.

    Raises StoreUnavailable.
    """
    try:
        header = await network.comms.get_update_start(window, uid, spec.data_start)
        return read_prologue(header, spec, window=window, uid=uid)[1]
    except StoreUnavailable:
        raise
    except (StoreError, PayloadError):
        return None
