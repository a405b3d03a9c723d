"""Verifies a validator's claims about miners as a third party, from miners' objects and the stores' time stamps.

A miner can delete or replace its objects at any time, but can't choose their time stamps. So an object is evidence only
if the validator certainly found the same one. Any other object, or a missing one, contradicts no claim.
"""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tplr.comms import Comms
from tplr.errors import ObjectNotFound, ObjectTooLarge, PayloadError, StoreError
from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.hparams import HParams
from tplr.keys import debug_key
from tplr.logging import logger
from tplr.node.observer import NO_PROBATION, NOT_EVALUATED, NOT_MEASURED
from tplr.node.sync_proofs import CONCURRENCY, REPORT_SECONDS, after_void, expected_proofs
from tplr.node.train_state import TrainState
from tplr.schemas import OUT_OF_SYNC, UNREAD, VALID, DebugReport, PeerObservation, Reason, ScoreReport, UploadBounds
from tplr.scoring.own_pages import FEWEST_OTHERS, deviations
from tplr.scoring.selection import evaluated_by_loss

# Reasons that stay true: an object with a time stamp within the bounds, or before them, existed when the window's bound
# passed. Every other reason may be due to a miner that deleted or replaced its update or commit afterwards.
LASTING = frozenset(
    (Reason.NO_BUCKET, Reason.TOO_EARLY, Reason.WRONG_SIZE, Reason.HASH_MISMATCH, Reason.MALFORMED, Reason.EMPTY)
)
# Reasons that contradict a published "valid". The others do not: before the bound a miner can replace a valid update by
# any object.
NEVER_VALID = frozenset((Reason.NO_BUCKET, Reason.TOO_EARLY))
# Claims that nobody else can verify: about the validator's own access, because a miner can close its bucket and open it
# later, and (``EXCLUDED``) about an elector's decision.
UNREACHED = frozenset((Reason.UNAVAILABLE, Reason.DENIED))
BELIEVED = UNREACHED | {Reason.EXCLUDED}


def refutes(now: str, published: str) -> bool:
    """Return whether an update's present verdict (``now``: "valid" or a ``Reason``) contradicts the published one."""
    if published == VALID:
        return now in NEVER_VALID
    return published not in (now, *BELIEVED) and (now == VALID or now in LASTING)


def leaves_open(now: str, published: str) -> bool:
    """Return whether a published verdict can no longer be verified."""
    return published != now and not refutes(now, published)


@dataclass
class SyncFindings:
    """The results of checking a validator's claims of how many steps miners are behind.

    Attributes:
        refuted: by uid, the published steps and the steps that its reports allow.
        gone: uids whose reports are deleted, replaced or not readable now.
        unread: uids whose reports were not readable according to the validator.
        not_judged: uids that the validator should have judged, but did not.
    """

    refuted: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    not_judged: list[int] = field(default_factory=list)


class SyncClaims:
    """Judges miners' reports of the last windows by the validator's rules."""

    def __init__(self, comms: Comms, hparams: HParams, start_window: int) -> None:
        self._comms = comms
        self._hparams = hparams
        self._start = start_window
        # Expected proofs by window and uid.
        self._expected: dict[int, dict[int, str]] = {}

    async def remember(self, train_state: TrainState, window: int) -> None:
        """Compute every miner's proof for ``window``, which ``train_state`` has just applied."""
        uids = [neuron.uid for neuron in self._comms.metagraph.neurons if neuron.uid in self._comms.commitments]
        block_hash = await self._comms.window_hash(window + 1)
        self._expected[window] = await asyncio.to_thread(expected_proofs, train_state, uids, window, block_hash)
        for old in [one for one in self._expected if one < window - self._hparams.sync_max_steps_behind]:
            del self._expected[old]

    async def check(self, report: ScoreReport) -> SyncFindings:
        """Compare the claims of ``report`` with the miners' own reports.

        Raises:
            ChainUnavailable: the chain does not answer.
        """
        found, newest = SyncFindings(), report.window - 1
        asked = {uid for uid, seen in report.observations.items() if seen.listed or seen.probation or seen.sampled}
        began = newest >= self._start
        for uid, seen in report.observations.items():
            if seen.behind is not None and not (began and uid in asked):
                found.refuted[int(uid)] = seen.behind, "not judged"
        if not began:
            return found
        judged = {int(uid): report.observations[uid] for uid in asked}
        try:
            void = await after_void(self._comms, self._start, newest)
        except (PayloadError, StoreError) as error:
            logger.info("window %d: void state unknown: %s", newest, error)
            void = True
        if void:  # the validator may or may not have known of it
            found.gone = sorted(uid for uid, seen in judged.items() if seen.behind is not None)
            return found
        slots = asyncio.Semaphore(CONCURRENCY)
        same_bucket = await self._same_bucket(report)
        before = (await self._comms.upload_bounds(report.window, 0.0)).start

        async def one(uid: int, seen: PeerObservation) -> None:
            if seen.behind is None:
                found.not_judged.append(uid)
                return
            if seen.behind == UNREAD:
                found.unread.append(uid)
                return
            async with slots:
                possible = await self._possible_results(uid, newest, before) if uid in same_bucket else None
            if possible is None or (seen.behind in possible and len(possible) > 1):
                found.gone.append(uid)
            elif seen.behind not in possible:
                found.refuted[uid] = seen.behind, " or ".join(map(str, sorted(possible)))

        async with asyncio.TaskGroup() as group:
            for uid, seen in sorted(judged.items()):
                group.create_task(one(uid, seen))
        for some in (found.gone, found.unread, found.not_judged):
            some.sort()
        return found

    async def _same_bucket(self, report: ScoreReport) -> set[int]:
        """Return the uids whose hotkey and bucket have not changed since the validator scored the window."""
        window, now = report.window, self._comms.commitments
        scored = min(window + self._hparams.validator_offset, self._comms.clock.window - 1)
        then = [await self._comms.buckets_in(one) for one in {window, max(window, scored)}]
        same = {uid for uid in now if all(uid in one and one[uid] == now[uid] for one in then)}
        hotkeys = {neuron.uid: neuron.hotkey for neuron in self._comms.metagraph.neurons}
        return {uid for uid in same if (seen := report.observations.get(str(uid))) and seen.hotkey == hotkeys.get(uid)}

    async def _possible_results(self, uid: int, newest: int, before: float) -> set[int]:
        """Return the results that an honest validator may have found, from the reports that it certainly read.

        Args:
            before: Unix seconds by the chain's clock; the validator did not read before this time.
        """
        found: set[int] = set()
        for window in range(newest, max(self._start, newest - self._hparams.sync_max_steps_behind) - 1, -1):
            steps = newest - window
            try:
                async with asyncio.timeout(REPORT_SECONDS):
                    report = await self._report_at(uid, window, before)
            except (StoreError, TimeoutError):
                found |= {steps, OUT_OF_SYNC}
                continue
            expected = self._expected.get(window, {}).get(uid)
            if report is not None and expected is None:
                return found | {steps, OUT_OF_SYNC}
            return found | {steps if report is not None and report.proof == expected else OUT_OF_SYNC}
        return found | {OUT_OF_SYNC}

    async def _report_at(self, uid: int, window: int, before: float) -> DebugReport | None:
        """Return the report that was in the bucket at ``before``; None for an object that is not a valid report.

        Raises:
            ObjectNotFound: the bucket may have held another report at that time, or none.
            StoreError: the report can't be read now.
        """
        store, key = self._comms.store_of(uid), debug_key(window, uid, self._hparams.version)
        if store is None:
            raise ObjectNotFound(f"uid {uid} has no bucket")
        try:
            report = await self._comms.get_report(uid, window)
        except (PayloadError, ObjectTooLarge):
            report = None
        info = await store.head(key)
        bounds = UploadBounds(before - STORE_CLOCK_SECONDS, float("inf"))
        if bounds.judge(info.last_modified) is not Reason.TOO_EARLY:
            raise ObjectNotFound("written after the validator may have read it", key=key)
        return report


def false_groups(
    report: ScoreReport, debug_report: DebugReport, listed: Collection[int]
) -> Iterator[tuple[str, object, object]]:
    """Yield false claims of who is listed, on probation or excluded, as (what, published, required).

    These are the rules of ``Observer``. A uid that the set neither includes nor refuses is on probation if it is on the
    window's peer list; so is an excluded one, whose update is fetched again. A uid that is not on this list may be on
    probation, too: the validator also reads the newest list when it scores the window, and nobody else knows when that
    was.

    Args:
        debug_report: the validator's report of the same window, whose set has been compared.
        listed: uids on the window's peer list, in its reserve and on probation.
    """
    for uid, seen in report.observations.items():
        included, reason = uid in debug_report.included, debug_report.skipped.get(uid)
        judged, excluded = included or reason is not None, reason is Reason.EXCLUDED
        if seen.listed != judged:
            yield f"uid {uid} listed", seen.listed, judged
        if report.profile == "documented" or (judged and not excluded):
            required = False
        elif int(uid) in listed and not without_probation(report):
            required = True
        else:  # either is possible
            required = seen.probation
        if seen.probation != required:
            yield f"uid {uid} on probation", seen.probation, required
        if seen.verdict == Reason.EXCLUDED and (seen.probation or not excluded):
            yield f"verdict on uid {uid}", seen.verdict, "not excluded by the set, or fetched again"


def without_probation(report: ScoreReport) -> bool:
    """Return whether the validator reports that it could not fetch the updates on probation."""
    return any(fault.startswith(NO_PROBATION) for fault in report.faults)


def omissions(report: ScoreReport, seed: int) -> Iterator[tuple[str, object, object]]:
    """Yield what a validator omitted, or did, against the rules, as (what, published, required).

    A missing measurement is allowed only with one of the validator's own ``faults``.

    Args:
        seed: of all the validator's random choices after the window.
    """
    alignment, seen = report.alignment, {int(uid): one for uid, one in sorted(report.observations.items())}
    sampled = [uid for uid, one in seen.items() if one.sampled]
    measured = alignment.uids if alignment else ()
    included = {uid for uid, one in seen.items() if one.included}
    blind = alignment is None and any(fault.startswith(NOT_MEASURED) for fault in report.faults)
    by_loss = evaluated_by_loss(sampled, seed=seed)
    for uid, one in seen.items():
        if one.verdict == VALID and one.assigned_pages is None and not blind:
            yield f"pages of uid {uid}", None, "checked, or a fault"
        if one.verdict == VALID and one.assigned_pages and uid not in measured and not blind:
            yield f"uid {uid} measured", False, "measured, or a fault"
        if uid in measured and not (one.verdict == VALID and one.assigned_pages):
            yield f"uid {uid} measured", True, "no update on its own pages"
        if not one.sampled:
            if one.assigned_products or one.evaluation:
                yield f"uid {uid} tested", True, "not sampled"
            continue
        faulty = blind or any(fault.startswith(f"{NOT_EVALUATED.format(uid=uid)}:") for fault in report.faults)
        many = len(measured) > FEWEST_OTHERS + 1
        if many and not one.assigned_products and not faulty:
            yield f"own-pages test of uid {uid}", None, "a test, or a fault"
        tests = {uid: one.assigned_products} if one.assigned_products else {}
        tested = many and alignment is not None and (uid, uid) in deviations(tests, alignment, included, only=uid)
        due = not tested or uid in by_loss
        if one.evaluation and many and not one.assigned_products:
            yield f"loss of uid {uid}", "evaluated", "not without its own-pages test, which is made before"
        if one.evaluation and not due:
            yield f"loss of uid {uid}", "evaluated", "not drawn"
        # Losses on the assigned pages stand in for a test that is not possible.
        if one.evaluation and (one.evaluation.assigned is None) != tested:
            yield f"loss on the assigned pages of uid {uid}", one.evaluation.assigned, None if tested else "evaluated"
        if not one.evaluation and due and not faulty:
            yield f"loss of uid {uid}", None, "evaluated, or a fault"
