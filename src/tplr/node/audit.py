"""Recomputes a validator's published results of a window from buckets and chain, and finds the first difference.

The model is replayed from the run's first weights, a checkpoint or a node's saved state, with the code that nodes run.
The included set and the fingerprint of every replayed window are compared. For the last window these are compared, too:
the aggregate, every claim about miners' objects, every product and loss, and every score that follows from the evidence
of the last windows.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import ObjectNotFound, PayloadError, ScoresSealed, StoreError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import IncludedSet, reported_set
from tplr.exchange.ballots import VOID_WITHIN
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.audit_claims import UNREACHED, SyncClaims, leaves_open, omissions, refutes
from tplr.node.audit_sets import Mismatch, OwnSet, SetClaims, same
from tplr.node.data_loader import WindowDataLoader
from tplr.node.elector import LAST_WINDOWS
from tplr.node.observer import NO_PROBATION, sample_batches
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.schemas import PRODUCT_DECIMALS, VALID, DebugReport, LossChange, Reason, ScoreReport
from tplr.scoring.profiles import score_board
from tplr.seeds import evaluation_seed, fingerprint_seed, proof_seed
from tplr.training.evaluation import Baseline
from tplr.training.loss import Precision

# Largest accepted difference between mean losses, in nats: other processors or numbers of threads give other last bits.
# The value for bfloat16 is half a standard error of 64 sequences.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-3}
# The same for products of updates with gradients and with each other, relative to the larger of 1 and the product; and
# for norms, relative to the norm, so that a false one can't make an update outsized.
PRODUCT_TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-2}
SCORE_TOLERANCE = 1e-7


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
        self._data_loader = data_loader
        self._comms = comms
        self._hparams = hparams
        self._validator = validator
        self._windows = WindowUpdates(comms, hparams, train_state.outer.spec)
        self._sets = SetClaims(comms, self._windows, hparams, size=train_state.outer.spec.expected_size)
        self._sync = SyncClaims(comms, hparams, train_state.start_window)
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
                await self._sync.remember(self._train_state, newest)
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
            await self._check_scores(scores_report, report, gathered)
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
        seed = seeds["fingerprint"]
        outer = await asyncio.to_thread(self._train_state.outer_fingerprint, seed)
        same("outer fingerprint", report.outer_fingerprint, outer)
        if report.digest:
            same("digest", report.digest, await asyncio.to_thread(self._train_state.digest))

    async def _check_scores(
        self, report: ScoreReport, debug_report: DebugReport, gathered: GatherResult[Update]
    ) -> None:
        """Compare verdicts, steps behind, losses, products, peer scores and weights."""
        same("seal of the score report", report.seal, report.sealed().seal)
        same("window of the score report", report.window, self.window)
        await self._check_hotkeys(report)
        voided = await self._recently_voided()
        try:
            await self._check_observations(report, debug_report, gathered)
        except Mismatch as found:
            if voided is None:
                raise
            self._leave_open(
                f"scores not verified: window {voided} was voided, possibly after they were computed with another "
                f"model or set: {Difference(self.window, *found.parts)}"
            )
        await self._check_peer_scores(report)
        await self._check_omissions(report)

    async def _recently_voided(self) -> int | None:
        """Return a recent window that was voided, perhaps after a validator had scored this window; None if none was.

        The range that is searched is the longest time that electors take to void a window.
        """
        after = VOID_WITHIN + 1 + LAST_WINDOWS - self._hparams.validator_offset
        for window in range(max(self._train_state.start_window, self.window - after), self.window + 1):
            included = await self._windows.published(window)
            if included is not None and not included.included and self._comms.is_voided(window):
                return window
        return None

    async def _check_observations(
        self, report: ScoreReport, debug_report: DebugReport, gathered: GatherResult[Update]
    ) -> None:
        """Compare the observations, which depend on the window's set and on the model before it."""
        included = {one.uid: one.update for one in gathered.updates}
        for uid in included:
            if (seen := report.observations.get(str(uid))) and seen.listed:
                same(f"verdict on uid {uid}", seen.verdict, VALID)
        for uid, reason in debug_report.skipped.items():
            if (seen := report.observations.get(uid)) and reason is not Reason.EXCLUDED:
                same(f"verdict on uid {uid}", seen.verdict, reason)
        for uid, seen in report.observations.items():
            same(f"uid {uid} included", seen.included, int(uid) in included)
        # The reasons of a decided set are the electors'; those of a set from the peers have been compared already.
        await self._check_refused(report, listed=gathered.published)
        await self._check_sync(report)
        await self._check_pages(report, included)
        await self._check_measures(report, included)

    async def _check_hotkeys(self, report: ScoreReport) -> None:
        """Compare hotkeys with the present ones, and those that differ with the ones at the window's end."""
        now = {neuron.uid: neuron.hotkey for neuron in self._comms.metagraph.neurons}
        if others := [uid for uid, seen in report.observations.items() if seen.hotkey != now.get(int(uid))]:
            then = await self._comms.hotkeys_in(self.window)
            for uid in others:
                same(f"hotkey of uid {uid}", report.observations[uid].hotkey, then.get(int(uid)))

    async def _check_refused(self, report: ScoreReport, *, listed: bool) -> None:
        """Compare verdicts on refused updates, on probation or also ``listed``, with the miners' buckets."""
        refused = {
            int(uid): seen.verdict
            for uid, seen in report.observations.items()
            if (seen.probation or listed) and seen.verdict and seen.verdict not in (VALID, Reason.EXCLUDED)
        }
        unreached = [uid for uid, verdict in refused.items() if verdict == Reason.UNAVAILABLE]
        if unreached:
            self._leave_open(f"verdicts on uids {unreached} not verified: reported as unreachable")
        asked = {uid: verdict for uid, verdict in refused.items() if uid not in unreached}
        found = await self._comms.gather_updates(asked, self.window, self._train_state.outer.spec, patient=True)
        now: dict[int, str] = dict.fromkeys((one.uid for one in found.updates), VALID)
        self._compare_verdicts(asked, now | found.skipped)

    def _compare_verdicts(self, published: Mapping[int, str], now: Mapping[int, str]) -> None:
        """Compare published verdicts with the present contents of the miners' buckets."""
        for uid, verdict in published.items():
            if refutes(now[uid], verdict):
                raise Mismatch(f"verdict on uid {uid}", verdict, now[uid])
        if gone := [uid for uid, verdict in published.items() if leaves_open(now[uid], verdict)]:
            why = ", ".join(f"{uid} {published[uid]}, now {now[uid]}" for uid in gone)
            self._leave_open(f"verdicts not verified, updates or commits are deleted or replaced: {why}")

    async def _check_sync(self, report: ScoreReport) -> None:
        """Compare the reported steps behind of miners with the miners' own reports."""
        found = await self._sync.check(report)
        for uid, (published, possible) in sorted(found.refuted.items()):
            raise Mismatch(f"steps behind of uid {uid}", published, possible)
        for uids, why in (
            (found.gone, "the miners' reports are deleted, replaced or not readable now"),
            (found.unread, "reported as not readable"),
            (found.not_judged, "the validator did not judge"),
        ):
            if uids:
                self._leave_open(f"steps behind of uids {uids} not verified: {why}")

    async def _check_omissions(self, report: ScoreReport) -> None:
        """Check that a fault explains every missing measurement; the faults themselves are not verified."""
        if self._hparams.profile != "documented":
            _, seed = await self._seed()
            with _consistent():
                for what, published, found in omissions(report, seed):
                    raise Mismatch(what, published, found)
            if not any(fault.startswith(NO_PROBATION) for fault in report.faults):
                await self._check_asked(report)
        for fault in report.faults:
            self._leave_open(f"the validator's own fault not verified: {fault}")

    async def _check_asked(self, report: ScoreReport) -> None:
        """Check that the update of every uid on the peer list was requested."""
        listed = await self._comms.get_peer_list(self.window)
        for uid in (*listed.peers, *listed.reserve_peers, *listed.probation) if listed else ():
            if (seen := report.observations.get(str(uid))) and seen.verdict is None:
                raise Mismatch(f"verdict on uid {uid}", None, "a verdict, or a fault")

    async def _check_pages(self, report: ScoreReport, included: Mapping[int, Update]) -> None:
        """Compare which miners named their assigned pages; if any update is measured, all of these must be."""
        for uid, update in included.items():
            seen = report.observations.get(str(uid))
            if seen is None or seen.assigned_pages is None:
                continue
            own = update.pages_digest == await self._data_loader.digest(uid, self.window)
            same(f"pages of uid {uid}", seen.assigned_pages, own)
            if report.alignment and own:
                same(f"uid {uid} measured", uid in report.alignment.uids, True)

    async def _check_measures(self, report: ScoreReport, included: Mapping[int, Update]) -> None:
        """Compare products and losses."""
        evaluated = [int(uid) for uid, seen in report.observations.items() if seen.evaluation]
        measured = report.alignment.uids if report.alignment else evaluated
        if not measured:
            return
        hotkey, seed = await self._seed()
        updates = await self._updates_of(measured, included)
        sampled = [int(uid) for uid, seen in report.observations.items() if seen.sampled]
        held_out = await self._data_loader.held_out(self.window, hotkey, sampled)
        same("held-out pages", report.held_out_pages, held_out.digest)
        gone = sorted({*measured}.difference(one.uid for one in updates))
        if gone and self._hparams.sparseloco and included.keys().isdisjoint(measured):
            # Norm caps and scale follow from the included updates, or from all if there are none.
            self._leave_open(f"products and losses not verified: they depend on the updates of uids {gone}")
            return
        batches = sample_batches(held_out, seed, self._hparams)
        await asyncio.to_thread(self._train_state.set_caps, list(included.values()) or updates)
        if report.alignment:
            before, found = await asyncio.to_thread(self._train_state.align, updates, batches, seed, len(measured))
            there = _there(report, updates)
            pairs = [one and other for i, one in enumerate(there) for other in there[i:]]
            for name, known in (("products", there), ("norms", there), ("gram", pairs)):
                published = itertools.compress(getattr(report.alignment, name), known)
                self._near(name, tuple(published), getattr(found, name), relative=name == "norms")
            self._compare_largest_norm(report.alignment.largest_norm, found.largest_norm)
            if report.alignment.loss is not None:
                self._compare_loss("held-out loss", report.alignment.loss, before.loss)
        else:
            before = await asyncio.to_thread(self._train_state.baseline, batches)
        for key, seen in sorted(report.observations.items(), key=lambda item: int(item[0])):
            if seen.assigned_products or seen.evaluation:
                await self._check_evaluation(int(key), report, updates, before, seed)

    async def _check_evaluation(
        self, uid: int, report: ScoreReport, updates: Sequence[Update], before: Baseline, seed: int
    ) -> None:
        """Compare the own-pages test and the losses of one miner."""
        seen = report.observations[str(uid)]
        assigned = sample_batches(await self._data_loader.assigned(uid, self.window), seed, self._hparams)
        if seen.assigned_products:
            there = _there(report, updates)
            products = await asyncio.to_thread(self._train_state.own_alignment, updates, assigned, seed, len(there))
            published = tuple(itertools.compress(seen.assigned_products, there))
            self._near(f"products on the pages of uid {uid}", published, products)
        update = next((one for one in updates if one.uid == uid), None)
        if seen.evaluation and update:
            pages = assigned if seen.evaluation.assigned else None
            found = await asyncio.to_thread(self._train_state.evaluate, update, pages, before)
            self._compare_losses(f"held-out loss of uid {uid}", seen.evaluation.held_out, found.held_out)
            if seen.evaluation.assigned and found.assigned:
                self._compare_losses(f"assigned loss of uid {uid}", seen.evaluation.assigned, found.assigned)

    async def _seed(self) -> tuple[str, int]:
        """Return the validator's hotkey, and the seed of all its random choices after this window."""
        hotkey = self._comms.get_hotkey(self._validator) or ""
        return hotkey, evaluation_seed(hotkey=hotkey, block_hash=await self._comms.window_hash(self.window + 1))

    async def _updates_of(self, uids: Iterable[int], included: Mapping[int, Update]) -> list[Update]:
        """Return the updates of these uids, ascending; those outside the included set are read from their buckets.

        Deleted or replaced updates are left out. Other miners' products depend on them only if no included one is
        measured.
        """
        missing = [uid for uid in uids if uid not in included]
        more = await self._comms.gather_updates(missing, self.window, self._train_state.outer.spec, patient=True)
        self._compare_verdicts(dict.fromkeys(more.skipped, VALID), more.skipped)
        updates = {**included, **{one.uid: one.update for one in more.updates}}
        return [updates[uid] for uid in sorted(uids) if uid in updates]

    def _compare_losses(self, what: str, published: LossChange, found: LossChange) -> None:
        for name in LossChange.model_fields:
            self._compare_loss(f"{what}, {name}", getattr(published, name), getattr(found, name))

    def _compare_loss(self, what: str, published: float | None, found: float | None) -> None:
        if published is None or found is None:
            same(what, published, found)
        elif abs(published - found) > TOLERANCE[self._hparams.precision]:
            raise Mismatch(what, published, found)

    def _compare_largest_norm(self, published: float | None, found: float | None) -> None:
        if published is None or found is None:
            same("largest honest norm", published, found)
        else:
            self._near("largest honest norm", (published,), (found,), relative=True)

    def _near(self, what: str, published: Sequence[float], found: Sequence[float], *, relative: bool = False) -> None:
        """Compare products, which are 1 for a step of the usual size along the gradient.

        Args:
            relative: they are norms, which have no usual size.
        """
        same(f"number of {what}", len(published), len(found))
        tolerance, least = PRODUCT_TOLERANCE[self._hparams.precision], 10.0**-PRODUCT_DECIMALS
        for one, other in zip(published, found, strict=True):
            if abs(one - other) > max(tolerance * (abs(other) if relative else max(1.0, abs(other))), least):
                raise Mismatch(what, one, other)

    async def _check_peer_scores(self, report: ScoreReport) -> None:
        """Compare scores and weights with those computed from the earlier reports and this report's observations."""
        same("profile", report.profile, self._hparams.profile)
        earlier = await self._earlier_reports(report)
        if earlier is None:
            return
        board, (_, seed) = score_board(self._hparams), await self._seed()
        with _consistent():
            board.resume(earlier)
            if report.alignment:
                pool = {uid: report.observations[str(uid)].hotkey for uid in report.alignment.uids}
                sampled = tuple(int(uid) for uid, seen in report.observations.items() if seen.sampled)
                same("sampled uids", tuple(sorted(sampled)), board.sample(pool, self.window, seed))
            outcome = board.see(report.evidence)
        same("earlier windows that the scores depend on", report.follows_from, board.follows_from)
        same("uids with a peer score", sorted(report.peer_scores), sorted(map(str, outcome.peer_scores)))
        for uid, one in outcome.peer_scores.items():
            published = report.peer_scores[str(uid)]
            if not _nearly_equal(published.model_dump(), one.model_dump()):
                raise Mismatch(f"peer score of uid {uid}", published, one)
        same("penalties", report.struck, {str(uid): codes for uid, codes in outcome.struck.items()})
        found = {str(uid): one for uid, one in board.weights.items()}
        if not _nearly_equal(report.weights, found):
            raise Mismatch("weights", report.weights, found)

    async def _earlier_reports(self, report: ScoreReport) -> list[ScoreReport] | None:
        """Return the reports that the scores follow from, ascending; None if one is deleted or not published.

        All published reports of the last windows are included, because scores must use all published evidence.
        """
        oldest = max(self._train_state.start_window, self.window - self._hparams.gradient_retention_windows)
        if self._hparams.profile == "hardened":
            oldest = max(oldest, self.window - self._hparams.pay_windows + 1)
        found: dict[int, ScoreReport] = {}
        for window in range(self.window - 1, oldest - 1, -1):
            try:
                found[window] = await self._comms.get_scores(self._validator, window)
            except ObjectNotFound:
                continue
            except PayloadError as error:
                raise Mismatch(f"the scores of window {window}", "some", error) from error
            if self._hparams.profile == "documented":
                break
        unread = [window for window in report.follows_from if window not in found]
        if unread:
            self._leave_open(f"peer scores not verified: no report of windows {unread}")
            return None
        return [found[window] for window in sorted(found)]


@contextlib.contextmanager
def _consistent() -> Iterator[None]:
    """Evidence that no formula takes, as it contradicts itself, is a difference."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise Mismatch("evidence from which scores can be computed", "none", found) from error


def _nearly_equal(published: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return whether two records are equal up to ``SCORE_TOLERANCE``: linear algebra differs in the last bits."""
    return published.keys() == found.keys() and all(
        math.isclose(one, other, rel_tol=SCORE_TOLERANCE, abs_tol=SCORE_TOLERANCE)
        if isinstance(one := published[key], float) and isinstance(other := found[key], float)
        else published[key] == found[key]
        for key in found
    )


def _there(report: ScoreReport, updates: Iterable[Update]) -> list[bool]:
    """Return, for each measured update, whether it could be fetched."""
    fetched = {one.uid for one in updates}
    return [uid in fetched for uid in report.alignment.uids] if report.alignment else []
