"""Recomputes a validator's published results of a window from buckets and chain, and finds the first difference.

The model is replayed from the run's first weights, a checkpoint or a node's saved state, by the code that nodes run.
Included set and fingerprint of every replayed window are compared; of the last one also the aggregate, every claim
about miners' objects, every product and loss, and every score that follows from the evidence of the last windows.
"""

import asyncio
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import ObjectNotFound, PayloadError, ScoresSealed, StoreError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import reported_set
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.audit_claims import SyncClaims, leaves_open, omissions, refutes
from tplr.node.data_loader import WindowDataLoader
from tplr.node.observer import NO_PROBATION, sample_batches
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.schemas import VALID, DebugReport, LossChange, Reason, ScoreReport
from tplr.scoring.profiles import score_board
from tplr.seeds import evaluation_seed, fingerprint_seed, proof_seed
from tplr.training.evaluation import Baseline
from tplr.training.loss import Precision

# Largest difference, in nats, between mean losses computed on other processors or with other numbers of threads, whose
# last bits differ. The value for bfloat16 is half a standard error of 64 sequences.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-3}
# The same for products of updates with gradients, and with each other, relative to the larger of 1 and the product.
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


class _Mismatch(Exception):
    def __init__(self, what: str, published: object, found: object) -> None:
        self.parts = (what, published, found)
        super().__init__(what)


class Auditor:
    """Audits windows in order.

    Args:
        train_state: model and scheme before ``window``.
        validator: uid of the audited validator.

    Attributes:
        unverified: what could not be recomputed, in words: it is believed.
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
        self._sync = SyncClaims(comms, hparams, train_state.start_window)
        self.unverified: list[str] = []

    async def audit(self, until: int, *, scores_from: int | None = None) -> Difference | None:
        """Check all windows up to ``until``; scores from ``scores_from`` on (default: of ``until`` only).

        Returns:
            The first difference, or None if everything agrees.

        Raises:
            ChainUnavailable, StoreError, DataError: needed data can't be read now, or are not published.
            WindowLost: an applied update is deleted.
        """
        first_scores = until if scores_from is None else scores_from
        while self.window <= until:
            newest = self.window - 1
            if newest >= max(self._train_state.start_window, first_scores - 1 - self._hparams.sync_max_steps_behind):
                await self._sync.remember(self._train_state, newest)
            try:
                await self._check(scores=self.window >= first_scores, last=self.window == until)
            except _Mismatch as found:
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
                logger.info("window %d: no scores, the validator only caught up: %s", window, error)
        except ScoresSealed:
            raise
        except ObjectNotFound as error:
            raise ObjectNotFound(
                f"window {window} not verified: validator {self._validator} has not published it, or it is deleted: "
                f"{error}"
            ) from error
        except PayloadError as error:
            raise _Mismatch(f"a report of validator {self._validator}", "one", error) from error
        unreached = [int(uid) for uid, reason in report.skipped.items() if reason is Reason.UNAVAILABLE]
        excluded = [int(uid) for uid, reason in report.skipped.items() if reason is Reason.EXCLUDED]
        if unreached:
            self._leave_open(f"uids {unreached} not verified: reported as unreachable")
        try:
            gathered = await self._gather(report, unreached, excluded)
        except PayloadError as error:
            raise _Mismatch("the peer list", "one", error) from error
        self._check_available(report, gathered)
        self._compare_sets(report, gathered)
        await self._check_published(report, aggregate=scores)
        if scores_report:
            await self._check_scores(scores_report, report, gathered)
        updates = [one.update for one in gathered.updates]
        await asyncio.to_thread(self._train_state.apply, updates)
        await self._check_model(report, await self._comms.window_hash(window + 1))

    def _check_available(self, report: DebugReport, gathered: GatherResult[Update]) -> None:
        """Raises StoreUnavailable or WindowLost if an update that the report names can't be read for no fault of it."""
        for uid, reason in gathered.skipped.items():
            what = f"window {self.window}: the update of uid {uid}, which was applied"
            if str(uid) not in report.included:
                continue
            if reason is Reason.UNAVAILABLE:
                raise StoreUnavailable(f"{what}, can't be reached now")
            if reason is Reason.MISSING and self.window < self._windows.oldest:
                raise WindowLost(f"{what}, is deleted: start from a state of a later window (--from)")

    def _leave_open(self, text: str) -> None:
        text = f"window {self.window}: {text}"
        logger.warning("%s", text)
        self.unverified.append(text)

    async def _gather(
        self, report: DebugReport, unreached: Sequence[int], excluded: Sequence[int]
    ) -> GatherResult[Update]:
        """What several electors decided together; a set that one validator decided alone is checked at the peers'."""
        window = report.window
        electors = await self._comms.electors_in(window)
        if len(electors.uids) > 1 and (included := await self._windows.published(window)):
            gathered = await self._windows.from_set(included)
            if gathered is None:
                raise _Mismatch("the included set", "one that can be applied", included)
            return gathered
        found = await self._windows.from_peers(window, unreached=unreached, excluded=excluded)
        # A miner that deletes or replaces its commit makes nobody a liar: the update itself still has the same hash.
        sha256s = {uid: report.included.get(str(uid)) for uid, why in found.skipped.items() if why is Reason.NO_COMMIT}
        applied = {uid: sha256 for uid, sha256 in sha256s.items() if sha256}
        if not applied:
            return found
        self._leave_open(f"uids {sorted(applied)}: commits not verified: deleted or replaced")
        more = await self._comms.gather_updates(
            applied, window, self._train_state.outer.spec, sha256s=applied, patient=True
        )
        # Nobody of the reserve takes their places.
        known = [one for one in found.updates if str(one.uid) in report.included]
        updates = sorted((*known, *more.updates), key=lambda one: one.uid)
        skipped = {uid: why for uid, why in found.skipped.items() if uid not in applied} | more.skipped
        return replace(found, updates=tuple(updates), skipped=skipped)

    def _compare_sets(self, report: DebugReport, gathered: GatherResult[Update]) -> None:
        found: dict[str, str] = {str(one.uid): one.sha256 for one in gathered.updates}
        found_skipped = {str(uid): reason.value for uid, reason in gathered.skipped.items()}
        for uid in sorted({*report.included, *found}, key=int):
            published = report.included.get(uid) or report.skipped.get(uid) or "not listed"
            now = found.get(uid) or found_skipped.get(uid) or "not listed"
            _same(f"update of uid {uid}", published, now)
        # Reasons of a decided set are the electors' (``_check_published``).
        both = set() if gathered.published else report.skipped.keys() & found_skipped.keys()
        for uid in sorted(report.skipped.keys() ^ found_skipped.keys(), key=int):
            published, now = report.skipped.get(uid), found_skipped.get(uid)
            if now != Reason.UNAVAILABLE:
                _same(f"why uid {uid} is not included", published, now)
        self._compare_verdicts(
            {int(uid): report.skipped[uid].value for uid in both}, {int(uid): found_skipped[uid] for uid in both}
        )

    async def _check_published(self, report: DebugReport, *, aggregate: bool) -> None:
        """Compare the published included set, if there is one, with the one that this validator reported."""
        if not self._hparams.manifest_timeout_seconds:
            return
        spec = self._train_state.outer.spec
        try:
            included = await self._comms.get_included(self.window)
        except PayloadError as error:
            raise _Mismatch("the included set", "a valid document", error) from error
        except StoreError as error:
            self._leave_open(f"included set and aggregate not compared: {error}")
            return
        if included is None:
            return
        reported = reported_set(report, self._hparams.version, size=spec.expected_size)
        _same("the included set: updates", included.included, reported.included)
        # Reasons are not compared: a node that did not get the set in time may have found the same updates, but other
        # reasons.
        _same("the included set: who is skipped", sorted(included.skipped), sorted(reported.skipped))
        _same("the included set: success rate", included.success_rate, reported.success_rate)
        if not aggregate:
            return
        try:  # its size is known to be true only now
            await self._comms.get_aggregate(included)
        except PayloadError as error:
            raise _Mismatch("the aggregate", "a valid object", error) from error
        except StoreError as error:
            self._leave_open(f"aggregate not compared: {error}")

    async def _check_model(self, report: DebugReport, block_hash: str) -> None:
        seeds = {
            "fingerprint": fingerprint_seed(window=report.window, block_hash=block_hash),
            "proof": proof_seed(uid=report.uid, window=report.window, block_hash=block_hash),
        }
        for name, seed in seeds.items():
            _same(name, getattr(report, name), await asyncio.to_thread(self._train_state.fingerprint, seed))
        if report.digest:
            _same("digest", report.digest, await asyncio.to_thread(self._train_state.digest))

    async def _check_scores(
        self, report: ScoreReport, debug_report: DebugReport, gathered: GatherResult[Update]
    ) -> None:
        """Compare verdicts, steps behind, losses, products, peer scores and weights."""
        _same("seal of the score report", report.seal, report.sealed().seal)
        _same("window of the score report", report.window, self.window)
        await self._check_hotkeys(report)
        included = {one.uid: one.update for one in gathered.updates}
        for uid in included:
            if (seen := report.observations.get(str(uid))) and seen.listed:
                _same(f"verdict on uid {uid}", seen.verdict, VALID)
        for uid, reason in debug_report.skipped.items():
            if (seen := report.observations.get(uid)) and reason is not Reason.EXCLUDED:
                _same(f"verdict on uid {uid}", seen.verdict, reason)
        for uid, seen in report.observations.items():
            _same(f"uid {uid} included", seen.included, int(uid) in included)
        # A decided set's own reasons are the electors'; those of a set from the peers are compared already.
        await self._check_refused(report, listed=gathered.published)
        await self._check_sync(report)
        await self._check_pages(report, included)
        await self._check_measures(report, included)
        await self._check_peer_scores(report)
        await self._check_omissions(report)

    async def _check_hotkeys(self, report: ScoreReport) -> None:
        """Compare hotkeys with the present ones, and where these are others, with those at the window's end."""
        now = {neuron.uid: neuron.hotkey for neuron in self._comms.metagraph.neurons}
        if others := [uid for uid, seen in report.observations.items() if seen.hotkey != now.get(int(uid))]:
            then = await self._comms.hotkeys_in(self.window)
            for uid in others:
                _same(f"hotkey of uid {uid}", report.observations[uid].hotkey, then.get(int(uid)))

    async def _check_refused(self, report: ScoreReport, *, listed: bool) -> None:
        """Compare why updates were refused, on probation or also ``listed``, with what the miners' buckets hold."""
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
        """Compare published verdicts with what the miners' buckets hold now."""
        for uid, verdict in published.items():
            if refutes(now[uid], verdict):
                raise _Mismatch(f"verdict on uid {uid}", verdict, now[uid])
        if gone := [uid for uid, verdict in published.items() if leaves_open(now[uid], verdict)]:
            why = ", ".join(f"{uid} {published[uid]}, now {now[uid]}" for uid in gone)
            self._leave_open(f"verdicts not verified, updates or commits are deleted or replaced: {why}")

    async def _check_sync(self, report: ScoreReport) -> None:
        """Compare how far miners are said to be behind with their own reports."""
        found = await self._sync.check(report)
        for uid, (published, possible) in sorted(found.refuted.items()):
            raise _Mismatch(f"steps behind of uid {uid}", published, possible)
        for uids, why in (
            (found.gone, "the miners' reports are deleted, replaced or not readable now"),
            (found.unread, "reported as not readable"),
            (found.not_judged, "the validator did not judge"),
        ):
            if uids:
                self._leave_open(f"steps behind of uids {uids} not verified: {why}")

    async def _check_omissions(self, report: ScoreReport) -> None:
        """Check that every measure that is missing is explained by a fault; faults themselves are believed."""
        if self._hparams.profile != "documented":
            _, seed = await self._seed()
            for what, published, found in omissions(report, seed):
                raise _Mismatch(what, published, found)
            if not any(fault.startswith(NO_PROBATION) for fault in report.faults):
                await self._check_asked(report)
        for fault in report.faults:
            self._leave_open(f"the validator's own fault not verified: {fault}")

    async def _check_asked(self, report: ScoreReport) -> None:
        """Check that everybody on the peer list was asked for its update."""
        listed = await self._comms.get_peer_list(self.window)
        for uid in (*listed.peers, *listed.reserve_peers, *listed.probation) if listed else ():
            if (seen := report.observations.get(str(uid))) and seen.verdict is None:
                raise _Mismatch(f"verdict on uid {uid}", None, "one, or a fault")

    async def _check_pages(self, report: ScoreReport, included: Mapping[int, Update]) -> None:
        """Compare who named its assigned pages; of these updates none may be left unmeasured while others are."""
        for uid, update in included.items():
            seen = report.observations.get(str(uid))
            if seen is None or seen.assigned_pages is None:
                continue
            own = update.pages_digest == await self._data_loader.digest(uid, self.window)
            _same(f"pages of uid {uid}", seen.assigned_pages, own)
            if report.alignment and own:
                _same(f"uid {uid} measured", uid in report.alignment.uids, True)

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
        _same("held-out pages", report.held_out_pages, held_out.digest)
        batches = sample_batches(held_out, seed, self._hparams)
        await asyncio.to_thread(self._train_state.set_caps, list(included.values()) or updates)
        if report.alignment:
            before, found = await asyncio.to_thread(self._train_state.align, updates, batches, seed, len(measured))
            there = _there(report, updates)
            pairs = [one and other for i, one in enumerate(there) for other in there[i:]]
            for name, known in (("products", there), ("norms", there), ("gram", pairs)):
                published = itertools.compress(getattr(report.alignment, name), known)
                self._near(name, tuple(published), getattr(found, name))
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
        """The validator's hotkey, and the seed of all that it draws after this window."""
        hotkey = self._comms.get_hotkey(self._validator) or ""
        return hotkey, evaluation_seed(hotkey=hotkey, block_hash=await self._comms.window_hash(self.window + 1))

    async def _updates_of(self, uids: Iterable[int], included: Mapping[int, Update]) -> list[Update]:
        """The updates of these uids, ascending, those that are not in the included set from their buckets.

        Without those that are deleted or replaced: nobody else's products depend on them.
        """
        missing = [uid for uid in uids if uid not in included]
        more = await self._comms.gather_updates(missing, self.window, self._train_state.outer.spec, patient=True)
        self._compare_verdicts(dict.fromkeys(more.skipped, VALID), more.skipped)
        updates = {**included, **{one.uid: one.update for one in more.updates}}
        return [updates[uid] for uid in sorted(uids) if uid in updates]

    def _compare_losses(self, what: str, published: LossChange, found: LossChange) -> None:
        for name in LossChange.model_fields:
            one, other = getattr(published, name), getattr(found, name)
            if one != other and (one is None or other is None or abs(one - other) > TOLERANCE[self._hparams.precision]):
                raise _Mismatch(f"{what}, {name}", one, other)

    def _near(self, what: str, published: Sequence[float], found: Sequence[float]) -> None:
        """Compare products: numbers that are 1 for a step of usual size along the gradient."""
        _same(f"number of {what}", len(published), len(found))
        for one, other in zip(published, found, strict=True):
            if abs(one - other) > PRODUCT_TOLERANCE[self._hparams.precision] * max(1.0, abs(other)):
                raise _Mismatch(what, one, other)

    async def _check_peer_scores(self, report: ScoreReport) -> None:
        """Compare scores and weights with those that follow from the earlier reports and this one's observations."""
        _same("profile", report.profile, self._hparams.profile)
        earlier = await self._earlier_reports(report)
        if earlier is None:
            return
        board = score_board(self._hparams)
        board.resume(earlier)
        if report.alignment:
            _, seed = await self._seed()
            pool = {uid: report.observations[str(uid)].hotkey for uid in report.alignment.uids}
            sampled = tuple(int(uid) for uid, seen in report.observations.items() if seen.sampled)
            _same("sampled uids", tuple(sorted(sampled)), board.sample(pool, self.window, seed))
        outcome = board.see(report.evidence)
        _same("earlier windows that the scores follow from", report.follows_from, board.follows_from)
        _same("uids with a peer score", sorted(report.peer_scores), sorted(map(str, outcome.peer_scores)))
        for uid, one in outcome.peer_scores.items():
            published = report.peer_scores[str(uid)]
            if not _alike(published.model_dump(), one.model_dump()):
                raise _Mismatch(f"peer score of uid {uid}", published, one)
        _same("penalties", report.struck, {str(uid): codes for uid, codes in outcome.struck.items()})
        found = {str(uid): one for uid, one in board.weights.items()}
        if not _alike(report.weights, found):
            raise _Mismatch("weights", report.weights, found)

    async def _earlier_reports(self, report: ScoreReport) -> list[ScoreReport] | None:
        """The reports that the scores follow from, ascending; None if one of them is deleted, or not published.

        Nothing may be left out: evidence of the last windows that is published belongs to them.
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
                raise _Mismatch(f"the scores of window {window}", "some", error) from error
            if self._hparams.profile == "documented":
                break
        unread = [window for window in report.follows_from if window not in found]
        if unread:
            self._leave_open(f"peer scores not verified: no report of windows {unread}")
            return None
        return [found[window] for window in sorted(found)]


def _alike(published: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether two records are equal but for the last bits of numbers, which linear algebra computes differently."""
    return published.keys() == found.keys() and all(
        math.isclose(one, other, rel_tol=SCORE_TOLERANCE, abs_tol=SCORE_TOLERANCE)
        if isinstance(one := published[key], float) and isinstance(other := found[key], float)
        else published[key] == found[key]
        for key in found
    )


def _there(report: ScoreReport, updates: Iterable[Update]) -> list[bool]:
    """Which of the measured updates are among those that could be fetched."""
    fetched = {one.uid for one in updates}
    return [uid in fetched for uid in report.alignment.uids] if report.alignment else []


def _same(what: str, published: object, found: object) -> None:
    if published != found:
        raise _Mismatch(what, published, found)
