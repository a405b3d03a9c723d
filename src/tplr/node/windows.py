"""Finds the updates of a window, live or past, by the same rules on every node."""

import asyncio
import hashlib
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from tplr.comms import Comms
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, parse
from tplr.errors import ChainUnavailable, ObjectNotFound, PayloadError, StoreError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import IncludedSet, reported_set
from tplr.exchange.agreed import ANSWER_SECONDS
from tplr.exchange.ballots import VOID_WITHIN
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.exchange.polling import pause_after
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.schemas import DebugReport, PeerList, Reason
from tplr.storage.retry import with_retry

RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 10.0
POLL_SECONDS = 0.25
REPORT_SECONDS = 2 * ANSWER_SECONDS  # for an elector that does not answer at first


class WindowUpdates:
    """Finds a window's updates by the decided set, else by most electors' reports, else in the peers' buckets."""

    def __init__(self, comms: Comms, hparams: HParams, spec: PayloadSpec, *, every_peer: bool = False) -> None:
        """``every_peer``: gather from all buckets on chain instead of from the peer list."""
        self._comms = comms
        self._hparams = hparams
        self.spec = spec
        self._every_peer = every_peer

    @property
    def oldest(self) -> int:
        """The oldest window whose updates must still be available."""
        return self._comms.clock.window - self._hparams.gradient_retention_windows

    async def of(self, window: int) -> GatherResult[Update]:
        """Return the updates to apply. Retries, with a warning, while the chain or a required bucket can't be reached.

        Raises:
            WindowLost: some updates are not available from any node.
        """
        pause = RETRY_SECONDS
        while True:
            try:
                gathered = await self.find(window)
                # Cache the hash, so that applying a gathered window needs no network.
                await self._comms.window_hash(window + 1)
                return gathered
            except (ChainUnavailable, StoreError, PayloadError) as error:
                logger.warning("gather failed, retrying in %.0f s: %s", pause, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def from_peers(
        self,
        window: int,
        *,
        unreached: Collection[int] = (),
        excluded: Collection[int] = (),
        fill_in: bool = True,
        within: float | None = None,
    ) -> GatherResult[Update]:
        """Fetch the updates in the peers' buckets, each checked independently.

        The next reserve peer replaces each peer without a valid update. ``unreached`` and ``excluded`` peers are not
        asked. For a past window, a bucket that does not answer is retried; for the last window it is not, because other
        nodes would wait too.

        Args:
            fill_in: if False, return the updates of all listed and reserve peers.
            within: seconds from now after which no update is waited for.

        Raises:
            ChainUnavailable, StoreError: the updates can't be looked up now.
            PayloadError: there is no valid peer list.
        """
        patient = window < self._comms.clock.window - 1
        if self._every_peer:
            asked = await self._comms.buckets_in(window)
            return await self._comms.gather_updates(asked, window, self.spec, patient=patient)
        listed = await self._comms.get_peer_list(window)
        if listed is None:
            raise PayloadError("the electors have published no peer list for this window")
        named = (*listed.peers, *listed.reserve_peers)
        asked = [uid for uid in named if uid not in unreached and uid not in excluded]
        gathered = await self._comms.gather_updates(asked, window, self.spec, patient=patient, within=within)
        skipped = gathered.skipped | dict.fromkeys(unreached, Reason.UNAVAILABLE)
        skipped |= dict.fromkeys((uid for uid in named if uid in excluded), Reason.EXCLUDED)
        whole = replace(gathered, skipped=skipped)
        return _fill_in(listed, whole) if fill_in else whole

    async def published(self, window: int) -> IncludedSet | None:
        """Read the window's decided set; None if there is none, it is not readable now, or it is not plausible."""
        if not self._hparams.manifest_timeout_seconds:
            return None
        try:
            if included := await self._comms.get_included(window):
                await self._check_plausible(included)
            return included
        except (ChainUnavailable, StoreError, PayloadError) as error:
            logger.info("included set of window %d not read: %s", window, error)
            return None

    async def _check_plausible(self, included: IncludedSet) -> None:
        """Raise PayloadError for a set with updates of a wrong size or of uids that are not on the peer list."""
        size = self.spec.expected_size
        if wrong := [one for one in included.included if one.size != size]:
            raise PayloadError(
                f"{len(wrong)} updates of a wrong size: uid {wrong[0].uid} has {wrong[0].size}, not {size}"
            )
        listed = None if self._every_peer else await self._comms.get_peer_list(included.window)
        if listed and (others := {one.uid for one in included.included} - {*listed.peers, *listed.reserve_peers}):
            raise PayloadError(f"uids {sorted(others)[:8]} are neither on the peer list nor in its reserve")

    async def reported(self, window: int) -> IncludedSet | None:
        """Return the set that most electors report; None if there is none or the reports can't be read now."""
        report = await majority_report(self._comms, window)
        return report and reported_set(report, self._hparams.version, size=self.spec.expected_size)

    async def find(self, window: int) -> GatherResult[Update]:
        """As ``of``, in one attempt.

        Raises:
            WindowLost: some updates are not available from any node.
            ChainUnavailable, StoreError, PayloadError: the updates can't be looked up now.
        """
        included = await self.published(window)
        if included and (agreed := await self._follow(included)):
            return agreed
        if included is None and window < self._comms.clock.window - 1:
            included = await self.reported(window)
            if included and (agreed := await self._follow(included)):
                return replace(agreed, published=False)  # another set may be decided later
        if window < self.oldest:
            raise WindowLost(f"window {window} has no included set, and updates before {self.oldest} are deleted")
        own = await self.from_peers(window)
        # The set of a past window is not awaited: if it is published later, this node rolls back.
        late = window < self._comms.clock.window - 1
        if included is None and not late and (included := await self.decided(window)):
            return await self._follow(included, own) or own
        return own

    async def _follow(
        self, included: IncludedSet, own: GatherResult[Update] | None = None
    ) -> GatherResult[Update] | None:
        """As ``from_set``, but raise StoreError instead of WindowLost while electors can still void the window."""
        try:
            return await self.from_set(included, own)
        except WindowLost as error:
            if self._comms.clock.window > included.window + VOID_WITHIN + 1:
                raise
            raise StoreError(str(error)) from error

    async def decided(self, window: int) -> IncludedSet | None:
        """Wait for the decided set for ``manifest_timeout_seconds``; None if it is not decided by then."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + self._hparams.manifest_timeout_seconds
        while loop.time() < until:
            if included := await self.published(window):
                return included
            await asyncio.sleep(min(pause_after(loop.time() - began, POLL_SECONDS), max(0.0, until - loop.time())))
        return None

    async def from_set(
        self, included: IncludedSet, own: GatherResult[Update] | None = None
    ) -> GatherResult[Update] | None:
        """Find the updates of a set in ``own``, then in the aggregate, the peers' buckets and the electors' buckets.

        Returns:
            None for a set that no node can apply, because a hash in it is not that of an update.

        Raises:
            WindowLost: some updates are not available from any node.
            ChainUnavailable, StoreError: some updates can't be reached now.
        """
        window = included.window
        wanted = {one.uid: one.sha256 for one in included.included}
        found = {one.uid: one for one in own.updates if wanted.get(one.uid) == one.sha256} if own else {}
        try:
            if found.keys() != wanted.keys():
                found |= await self._aggregated(included)
            if missing := sorted(wanted.keys() - found.keys()):
                late = await self._comms.gather_updates(missing, window, self.spec, sha256s=wanted, patient=True)
                found |= {one.uid: one for one in late.updates}
                found |= await self._witnessed(included, wanted.keys() - found.keys())
                if lost := sorted(wanted.keys() - found.keys()):
                    text = f"window {window}: uids {lost} are in its included set, and their updates are unavailable"
                    if silent := [uid for uid in lost if late.skipped.get(uid) is Reason.UNAVAILABLE]:
                        raise StoreError(f"{text}: the buckets of uids {silent} do not answer")
                    raise WindowLost(text)
        except PayloadError as error:
            logger.error("the included set of window %d can't be applied: %s", window, error)
            return None
        skipped = {int(uid): reason for uid, reason in included.skipped.items()}
        updates = tuple(found[uid] for uid in sorted(found))
        return GatherResult(window=window, updates=updates, skipped=skipped, published=True)

    async def kept(self, included: IncludedSet, uids: Collection[int]) -> dict[int, GatheredUpdate[Update]]:
        """Find updates of a set that their peers may have deleted: in its aggregate, else at an elector.

        Raises:
            PayloadError: a hash in the set is not that of an update.
        """
        found = {uid: one for uid, one in (await self._aggregated(included)).items() if uid in uids}
        return found | await self._witnessed(included, [uid for uid in uids if uid not in found])

    async def _witnessed(self, included: IncludedSet, uids: Collection[int]) -> dict[int, GatheredUpdate[Update]]:
        """Fetch updates that this node can't get from the peers' buckets from an elector that found them in time."""
        found = {}
        for uid, body in (await self._comms.witnessed(included, uids) if uids else {}).items():
            found[uid] = await asyncio.to_thread(self.parsed, included.window, uid, body)
        return found

    def parsed(self, window: int, uid: int, body: bytes) -> GatheredUpdate[Update]:
        """Parse an update to the form that a gather returns. Raises PayloadError."""
        update = parse(body, self.spec, window=window, uid=uid)
        return GatheredUpdate(uid, update, hashlib.sha256(body).hexdigest(), len(body))

    async def _aggregated(self, included: IncludedSet) -> dict[int, GatheredUpdate[Update]]:
        """Read the updates of a set from its aggregate; empty if there is no valid aggregate.

        Raises:
            PayloadError: a hash in the set is not that of an update.
        """
        try:
            bodies = await self._comms.get_aggregate(included)
        except (StoreError, PayloadError) as error:
            logger.info("aggregate of window %d not used: %s", included.window, error)
            bodies = None
        if bodies is None:
            return {}
        found = {}
        for one, body in zip(included.included, bodies, strict=True):
            update = await asyncio.to_thread(parse, body, self.spec, window=included.window, uid=one.uid)
            found[one.uid] = GatheredUpdate(one.uid, update, one.sha256, one.size)
        return found


async def majority_report(comms: Comms, window: int, *, whole: bool = False) -> DebugReport | None:
    """Return a report of ``window`` whose fingerprints and updates electors with more than half of the stake confirm.

    None if there is none, or the reports can't be read now.

    Args:
        whole: whether they confirm its digest, too.
    """
    try:
        return await agreed_report(comms, window, whole=whole)
    except StoreUnavailable as error:
        logger.info("the electors' reports of window %d not read: %s", window, error)
        return None


async def published_report(comms: Comms, window: int, *, whole: bool = False) -> DebugReport | None:
    """As ``majority_report``, for readers of past windows: buckets that do not answer are asked again.

    Raises:
        StoreUnavailable: reports that may be published can't be read now.
    """
    return await with_retry(lambda: agreed_report(comms, window, whole=whole), deadline_seconds=REPORT_SECONDS)


async def agreed_report(comms: Comms, window: int, *, whole: bool = False) -> DebugReport | None:
    """As ``majority_report``. Raises StoreUnavailable if the reports can't be read now."""
    ask = partial(comms.get_report, window=window)
    try:
        return await comms.agreed(ask, key=partial(_agreed_part, whole=whole))
    except StoreUnavailable:
        raise
    except ObjectNotFound:
        return None
    except (StoreError, PayloadError) as error:
        logger.info("the electors' reports of window %d not read: %s", window, error)
        return None


def _agreed_part(report: DebugReport, *, whole: bool) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """Return what is equal in the reports of all nodes that agree; the digest only if ``whole``."""
    hashes = report.fingerprint, report.outer_fingerprint, report.digest if whole else ""
    return *hashes, tuple(sorted(report.included.items()))


def _fill_in(listed: PeerList, gathered: GatherResult[Update]) -> GatherResult[Update]:
    """Select the peers' updates from those found; for each missing one, that of the next reserve peer."""
    found = {one.uid: one for one in gathered.updates}
    peers = [uid for uid in listed.peers if uid in found]
    reserve = [uid for uid in listed.reserve_peers if uid in found and uid not in listed.peers]
    counted = sorted([*peers, *reserve[: len(listed.peers) - len(peers)]])
    # Excluded reserve peers are also named, so that a node that assembles the set later does not include them.
    named = {uid for uid, reason in gathered.skipped.items() if reason is Reason.EXCLUDED}.union(listed.peers)
    skipped = {uid: reason for uid, reason in gathered.skipped.items() if uid in named}
    return GatherResult(window=gathered.window, updates=tuple(found[uid] for uid in counted), skipped=skipped)
