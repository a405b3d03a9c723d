"""Recomputes a validator's published results of a window from buckets and chain, and finds the first difference.

The model is replayed from the run's first weights, a checkpoint or a node's saved state, with the code that nodes run.
The included set and the fingerprint of every replayed window are compared. For the last window these are compared, too:
the aggregate, and the score report (``audit_scores.py``).
"""

import asyncio
from dataclasses import dataclass

from tplr.comms import Comms
from tplr.errors import ObjectNotFound, PayloadError, ScoresSealed, StoreError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import IncludedSet, reported_set
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.audit_claims import UNREACHED
from tplr.node.audit_scores import ScoreClaims
from tplr.node.audit_sets import Mismatch, OwnSet, SetClaims, same
from tplr.node.data_loader import WindowDataLoader
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.schemas import DebugReport, Reason
from tplr.seeds import fingerprint_seed, proof_seed


@dataclass(frozen=True)
class Difference:
    """A published value, and the recomputed one that differs from it."""

    window: int
    what: str
    published: object
    found: object

    def __str__(self) -> str:
        return f"window {self.window}: {self.what}: published {self.published}, found {self.found}"


class Auditor:
    """Audits windows in order.

    Args:
        train_state: model and scheme before ``window``.
        validator: uid of the audited validator.

    Attributes:
        unverified: descriptions of the claims that could not be recomputed and are not verified.
    """

    def __init__(
        self,
        train_state: TrainState,
        window: int,
        data_loader: WindowDataLoader,
        comms: Comms,
        hparams: HParams,
        *,
        validator: int,
    ) -> None:
        self.window = window
        self._train_state = train_state
        self._comms = comms
        self._hparams = hparams
        self._validator = validator
        self._windows = WindowUpdates(comms, hparams, train_state.outer.spec)
        self._sets = SetClaims(comms, self._windows, hparams, size=train_state.outer.spec.expected_size)
        self._scores = ScoreClaims(
            comms, self._windows, hparams, train_state, data_loader, validator=validator, leave_open=self._leave_open
        )
        self.unverified: list[str] = []

    async def audit(self, until: int, *, scores_from: int | None = None) -> Difference | None:
        """Check all windows up to ``until``; scores from ``scores_from`` on (default: of ``until`` only).

        Returns:
            The first difference, or None if everything agrees.

        Raises:
            ChainUnavailable, StoreError, DataError: needed data can't be read now, or are not published.
            WindowLost: an applied update is no longer available from any node.
        """
        first_scores = until if scores_from is None else scores_from
        while self.window <= until:
            newest = self.window - 1
            if newest >= max(self._train_state.start_window, first_scores - 1 - self._hparams.sync_max_steps_behind):
                await self._scores.remember(newest)
            try:
                await self._check(scores=self.window >= first_scores, last=self.window == until)
            except Mismatch as found:
                return Difference(self.window, *found.parts)
            logger.info("window %d agrees", self.window)
            self.window += 1
        return None

    async def _check(self, *, scores: bool, last: bool) -> None:
        window, scores_report = self.window, None
        try:
            report = await self._comms.get_report(self._validator, window)
            try:
                scores_report = await self._comms.get_scores(self._validator, window) if scores else None
            except ObjectNotFound as error:
                if last or isinstance(error, ScoresSealed):
                    raise
                logger.info("window %d: no scores, the validator was catching up: %s", window, error)
        except ScoresSealed:
            raise
        except ObjectNotFound as error:
            raise ObjectNotFound(
                f"window {window} not verified: validator {self._validator} has not published it, or it is deleted: "
                f"{error}"
            ) from error
        except PayloadError as error:
            then = (await self._comms.hotkeys_in(window)).get(self._validator)
            if then not in (None, self._comms.get_hotkey(self._validator)):
                raise ObjectNotFound(
                    f"window {window} not verified: uid {self._validator} had another hotkey then, {then}: {error}"
                ) from error
            raise Mismatch(f"a report of validator {self._validator}", "one", error) from error
        if unreached := [int(uid) for uid, why in report.skipped.items() if why in UNREACHED]:
            self._leave_open(f"uids {unreached} not verified: reported as unreachable, or closed to it")
        found = await self._gather(report)
        await self._check_published(report, aggregate=scores)
        if found.lost:  # everything else has been compared
            raise found.lost
        gathered = found.gathered
        if scores_report:
            await self._scores.check(scores_report, report, gathered)
        updates = [one.update for one in gathered.updates]
        await asyncio.to_thread(self._train_state.apply, updates)
        await self._check_model(report, await self._comms.window_hash(window + 1))

    def _leave_open(self, text: str) -> None:
        text = f"window {self.window}: {text}"
        logger.warning("%s", text)
        self.unverified.append(text)

    async def _gather(self, report: DebugReport) -> OwnSet:
        """Return the set that several electors decided; check a sole elector's set against the peers' buckets."""
        included = await self._windows.published(report.window)
        several = len((await self._comms.electors_in(report.window)).uids) > 1
        if several and included is None:
            included = await self._windows.reported(report.window)
        if included is not None and not included.included and self._comms.is_voided(report.window):
            await self._check_voided(report, several=several)
        elif not several or included is None:
            return await self._gather_own(report, undecided=several)
        self._compare_sets(report, included)
        gathered = await self._windows.from_set(included)
        if gathered is None:
            raise Mismatch("the included set", "one that can be applied", included)
        return OwnSet(gathered)

    async def _gather_own(self, report: DebugReport, *, undecided: bool) -> OwnSet:
        """Check a set against the peers' buckets.

        Args:
            undecided: the decision of several electors is not readable; they may have decided a set that differs, so a
                difference raises StoreUnavailable instead of Mismatch.
        """
        try:
            found = await self._sets.check(report)
        except PayloadError as error:  # the list is read from the present electors; the validator may not be one
            raise ObjectNotFound(f"window {report.window} not verified: no peer list is readable: {error}") from error
        except Mismatch as error:
            if not undecided:
                raise
            raise StoreUnavailable(
                f"window {report.window} not verified: the electors' decision is not published or not readable now, "
                f"and the buckets differ: {Difference(report.window, *error.parts)}"
            ) from error
        for text in found.unverified:
            self._leave_open(text)
        return found

    async def _check_voided(self, report: DebugReport, *, several: bool) -> None:
        """Check the report of a window that was voided later; raise WindowLost if it is from before the rollback."""
        if not several:
            self._leave_open("not verified: voided by its only elector, which reports a lost update")
        if not report.included:
            return
        value = await self._comms.get_decision(report.window)
        before = {str(one.uid): one.sha256 for one in value.included.included} if value else None
        if before == report.included:
            raise WindowLost(
                f"window {report.window} was voided later, and validator {report.uid} has not rolled back, or ended "
                "before it could: start from a state of a later window (--from)"
            )

    def _compare_sets(self, report: DebugReport, decided: IncludedSet) -> None:
        """Compare the reported set with a decided one, whose skip reasons are the electors' (``_check_published``)."""
        found = {str(one.uid): one.sha256 for one in decided.included}
        for uid in sorted({*report.included, *found}, key=int):
            published = report.included.get(uid) or report.skipped.get(uid) or "not listed"
            same(f"update of uid {uid}", published, found.get(uid) or decided.skipped.get(uid) or "not listed")
        for uid in sorted(report.skipped.keys() ^ decided.skipped.keys(), key=int):
            if (now := decided.skipped.get(uid)) != Reason.UNAVAILABLE:
                same(f"why uid {uid} is not included", report.skipped.get(uid), now)

    async def _check_published(self, report: DebugReport, *, aggregate: bool) -> None:
        """Compare the published included set, if there is one, with the one that this validator reported."""
        if not self._hparams.manifest_timeout_seconds:
            return
        spec = self._train_state.outer.spec
        try:
            included = await self._comms.get_included(self.window)
        except PayloadError as error:
            raise Mismatch("the included set", "a valid document", error) from error
        except StoreError as error:
            self._leave_open(f"included set and aggregate not compared: {error}")
            return
        if included is None:
            return
        reported = reported_set(report, self._hparams.version, size=spec.expected_size)
        same("the included set: updates", included.included, reported.included)
        # Reasons are not compared: a node that did not get the set in time may have found the same updates for
        # different reasons.
        same("the included set: skipped uids", sorted(included.skipped), sorted(reported.skipped))
        same("the included set: success rate", included.success_rate, reported.success_rate)
        # The aggregate of an empty set may be that of the set decided before the window was voided.
        if not aggregate or not included.included:
            return
        try:  # only now is the set's size verified, and so the aggregate's
            await self._comms.get_aggregate(included)
        except PayloadError as error:
            await self._check_own_aggregate(included)
            self._leave_open(f"aggregate not compared, the stored one is invalid: {error}")
        except StoreError as error:
            self._leave_open(f"aggregate not compared: {error}")

    async def _check_own_aggregate(self, included: IncludedSet) -> None:
        """Check the validator's own aggregate if it was the sole elector.

        With several electors, one aggregate may hold updates that only its elector had found.
        """
        if (await self._comms.electors_in(included.window)).uids != (self._validator,):
            return
        try:
            await self._comms.aggregate_of(self._validator, included)
        except PayloadError as error:
            raise Mismatch("the aggregate", "a valid object", error) from error

    async def _check_model(self, report: DebugReport, block_hash: str) -> None:
        seeds = {
            "fingerprint": fingerprint_seed(window=report.window, block_hash=block_hash),
            "proof": proof_seed(uid=report.uid, window=report.window, block_hash=block_hash),
        }
        for name, seed in seeds.items():
            same(name, getattr(report, name), await asyncio.to_thread(self._train_state.fingerprint, seed))
        seed, whole = seeds["fingerprint"], self._train_state.has_digest(report.window)
        outer = await asyncio.to_thread(self._train_state.outer_fingerprint, seed, whole)
        same("outer fingerprint", report.outer_fingerprint, outer)
        same("digest", report.digest, await asyncio.to_thread(self._train_state.digest) if whole else "")
