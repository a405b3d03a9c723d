"""Recomputes a validator's published results of a window from buckets and chain, and finds the first difference.

The model is replayed from the run's first weights, a checkpoint or a node's saved state, by the code that nodes run.
Included set and fingerprint of every replayed window are compared; of the last one also the aggregate, every loss, and
every score that follows from the validator's observations.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import ObjectNotFound, PayloadError, StoreError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import reported_set
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.data_loader import WindowDataLoader
from tplr.node.observer import sample_batches
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.schemas import DebugReport, Evaluation, PeerScore, Reason, ScoreReport
from tplr.scoring.board import step, weights
from tplr.seeds import evaluation_seed, fingerprint_seed, proof_seed
from tplr.training.loss import Precision

# Largest difference, in nats, between mean losses computed on other processors or with other numbers of threads, whose
# last bits differ. The value for bfloat16 is half a standard error of 64 sequences.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-3}


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

    async def audit(self, until: int, *, scores_from: int | None = None) -> Difference | None:
        """Check all windows up to ``until``; scores from ``scores_from`` on (default: of ``until`` only).

        Returns:
            The first difference, or None if everything agrees.

        Raises:
            ChainUnavailable, StoreError, DataError: needed data can't be read now.
            WindowLost: an applied update is deleted.
        """
        first_scores = until if scores_from is None else scores_from
        while self.window <= until:
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
                if last:
                    raise
                logger.info("window %d: no scores, the validator only caught up: %s", window, error)
        except (ObjectNotFound, PayloadError) as error:
            raise _Mismatch(f"a report of validator {self._validator}", "one", error) from error
        unreached = [int(uid) for uid, reason in report.skipped.items() if reason is Reason.UNAVAILABLE]
        if unreached:
            logger.warning("window %d: uids %s not verified: reported as unreachable", window, unreached)
        try:
            gathered = await self._windows.from_peers(window, unreached=unreached)
        except PayloadError as error:
            raise _Mismatch("the peer list", "one", error) from error
        self._check_available(report, gathered)
        _compare_sets(report, gathered)
        await self._check_published(report, aggregate=scores)
        if scores_report:
            await self._check_scores(scores_report, gathered)
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

    async def _check_published(self, report: DebugReport, *, aggregate: bool) -> None:
        """Compare the published included set, if there is one, with the one that this validator reported."""
        if not self._hparams.manifest_timeout_seconds:
            return
        spec = self._train_state.outer.spec
        try:
            included = await self._comms.get_included(self.window)
            if included and aggregate:
                await self._comms.get_aggregate(included)
        except PayloadError as error:
            raise _Mismatch("the included set and its aggregate", "valid objects", error) from error
        except StoreError as error:
            logger.warning("window %d: included set and aggregate not compared: %s", self.window, error)
            return
        if included is None:
            return
        reported = reported_set(report, self._hparams.version, size=spec.expected_size)
        _same("the included set: updates", included.included, reported.included)
        # Reasons are not compared: a node that did not get the set in time may have found the same updates, but other
        # reasons.
        _same("the included set: who is skipped", sorted(included.skipped), sorted(reported.skipped))
        _same("the included set: success rate", included.success_rate, reported.success_rate)

    async def _check_model(self, report: DebugReport, block_hash: str) -> None:
        seeds = {
            "fingerprint": fingerprint_seed(window=report.window, block_hash=block_hash),
            "proof": proof_seed(uid=report.uid, window=report.window, block_hash=block_hash),
        }
        for name, seed in seeds.items():
            _same(name, getattr(report, name), await asyncio.to_thread(self._train_state.fingerprint, seed))
        if report.digest:
            _same("digest", report.digest, await asyncio.to_thread(self._train_state.digest))

    async def _check_scores(self, report: ScoreReport, gathered: GatherResult[Update]) -> None:
        """Compare verdicts, losses, peer scores and weights."""
        _same("seal of the score report", report.seal, report.sealed().seal)
        _same("window of the score report", report.window, self.window)
        hotkeys = {str(neuron.uid): neuron.hotkey for neuron in self._comms.metagraph.neurons}
        for uid, seen in report.observations.items():
            _same(f"hotkey of uid {uid}", seen.hotkey, hotkeys.get(uid))
        for one in gathered.updates:
            if (seen := report.observations.get(str(one.uid))) and seen.listed:
                _same(f"verdict on uid {one.uid}", seen.verdict, "valid")
        await self._check_losses(report, {one.uid: one.update for one in gathered.updates})
        await self._check_peer_scores(report)

    async def _check_losses(self, report: ScoreReport, updates: Mapping[int, Update]) -> None:
        measured = {int(uid): seen.evaluation for uid, seen in report.observations.items() if seen.evaluation}
        if not measured:
            return
        chosen = [int(uid) for uid, seen in report.observations.items() if seen.chosen and seen.own_pages]
        hotkey = self._comms.get_hotkey(self._validator) or ""
        seed = evaluation_seed(hotkey=hotkey, block_hash=await self._comms.window_hash(self.window + 1))
        missing = [uid for uid in measured if uid not in updates]
        more = await self._comms.gather_updates(missing, self.window, self._train_state.outer.spec, patient=True)
        updates = {**updates, **{one.uid: one.update for one in more.updates}}
        held_out = await self._data_loader.held_out(self.window, hotkey, chosen)
        _same("held-out pages", report.random_pages, held_out.digest)
        precision = self._hparams.precision
        random = await asyncio.to_thread(self._train_state.baseline, sample_batches(held_out, seed, self._hparams))
        for uid, published in sorted(measured.items()):
            if uid not in updates:
                raise _Mismatch(f"update of uid {uid}", "measured", more.skipped.get(uid, Reason.MISSING).value)
            assigned = await self._data_loader.assigned(uid, self.window)
            batches = sample_batches(assigned, seed, self._hparams)
            found = await asyncio.to_thread(self._train_state.evaluate, updates[uid], batches, random)
            for name in Evaluation.model_fields:
                one, other = getattr(published, name), getattr(found, name)
                if one != other and (one is None or other is None or abs(one - other) > TOLERANCE[precision]):
                    raise _Mismatch(f"{name.replace('_', ' ')} of uid {uid}", one, other)

    async def _check_peer_scores(self, report: ScoreReport) -> None:
        """Compare scores and weights with those that follow from the previous report and this one's observations."""
        _same("profile", report.profile, self._hparams.profile)
        before = await self._previous_peer_scores()
        if before is None:
            logger.warning("peer scores of window %d not verified: no earlier report is left", self.window)
            return
        held: dict[int, PeerScore] = {int(uid): one for uid, one in before.items()}
        outcome = step(held, {int(uid): one for uid, one in report.observations.items()}, self.window, self._hparams)
        for uid, one in outcome.peer_scores.items():
            _same(f"peer score of uid {uid}", report.peer_scores.get(str(uid)), one)
        _same("uids with a peer score", sorted(report.peer_scores), sorted(map(str, outcome.peer_scores)))
        _same("penalties", report.struck, {str(uid): codes for uid, codes in outcome.struck.items()})
        found = weights(outcome.peer_scores, self._hparams)
        _same("weights", report.weights, {str(uid): one for uid, one in found.items()})

    async def _previous_peer_scores(self) -> Mapping[str, PeerScore] | None:
        """Those of the last earlier report; empty at the run's start; None if all are deleted."""
        oldest = max(self._train_state.start_window, self.window - self._hparams.gradient_retention_windows)
        for window in range(self.window - 1, oldest - 1, -1):
            try:
                return (await self._comms.get_scores(self._validator, window)).peer_scores
            except ObjectNotFound:
                continue
            except PayloadError as error:
                raise _Mismatch(f"the scores of window {window}", "some", error) from error
        return {} if oldest == self._train_state.start_window else None


def _compare_sets(report: DebugReport, gathered: GatherResult[Update]) -> None:
    found: dict[str, str] = {str(one.uid): one.sha256 for one in gathered.updates}
    found_skipped = {str(uid): reason.value for uid, reason in gathered.skipped.items()}
    for uid in sorted({*report.included, *found}, key=int):
        published = report.included.get(uid) or report.skipped.get(uid) or "not listed"
        now = found.get(uid) or found_skipped.get(uid) or "not listed"
        _same(f"update of uid {uid}", published, now)
    for uid in sorted({*report.skipped, *found_skipped}, key=int):
        published, now = report.skipped.get(uid), found_skipped.get(uid)
        if now != Reason.UNAVAILABLE:
            _same(f"why uid {uid} is not included", published, now)


def _same(what: str, published: object, found: object) -> None:
    if published != found:
        raise _Mismatch(what, published, found)
