"""A validator's observations of a window: one record for each miner, of validity, copies, reports and losses.

A failure on the validator's own side leaves fields unset and adds a line to ``faults``; it changes no score.
"""

import asyncio
import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tplr.compress.payload import Update
from tplr.errors import ChainUnavailable, DataError, ObjectNotFound, PayloadError, StoreError, TrainingError
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.hparams import HParams
from tplr.keys import commit_key, gradient_key
from tplr.logging import logger
from tplr.node.data_loader import WindowBatches, WindowDataLoader
from tplr.node.replica import NodeContext
from tplr.node.train_state import TrainState
from tplr.schemas import OUT_OF_SYNC, VALID, PeerObservation, PeerScore, ScoreReport, WeightsSet
from tplr.scoring.board import Outcome, ScoreBoard
from tplr.scoring.copies import find_copies
from tplr.scoring.measures import gradient_score
from tplr.scoring.overlap import sample_chunks, traits
from tplr.scoring.selection import choose_evaluated
from tplr.seeds import derive, evaluation_seed, proof_seed
from tplr.storage.retry import with_retry

REPORT_SECONDS = 10.0
CONCURRENCY = 32


@dataclass
class Observation:
    """The observations of a window by uid, and what else its score report holds."""

    window: int
    observations: dict[int, PeerObservation]
    random_pages: str = ""
    faults: list[str] = field(default_factory=list)

    def note(self, uid: int, **seen: Any) -> None:
        """Set fields of the observation of ``uid``; ignored if it is not a miner."""
        if uid in self.observations:
            self.observations[uid] = self.observations[uid].model_copy(update=seen)

    @contextlib.contextmanager
    def own_fault(self, what: str) -> Iterator[None]:
        """Record a failure within the block as this validator's own fault."""
        try:
            yield
        except (ChainUnavailable, DataError, StoreError, TrainingError) as error:
            logger.warning("window %d: %s: %s", self.window, what, error)
            self.faults.append(f"{what}: {error}")


class Observer:
    """Observes windows in order. Call ``observe`` before the window is applied."""

    def __init__(
        self, train_state: TrainState, data_loader: WindowDataLoader, context: NodeContext, hparams: HParams
    ) -> None:
        self._train_state = train_state
        self._data_loader = data_loader
        self._comms = context.comms
        self._telemetry = context.telemetry
        self._hparams = hparams
        # Updates of the previous window, to detect repeats; expected proofs of the last windows, for late reports.
        self._previous: tuple[Update, ...] = ()
        self._proofs: dict[int, dict[int, str]] = {}

    async def observe(self, gathered: GatherResult[Update], peer_scores: Mapping[int, PeerScore]) -> Observation:
        """Observe the next window to apply, whose updates are ``gathered``."""
        seen = Observation(gathered.window, self._miners(peer_scores))
        self._note_verdicts(seen, gathered, listed=True)
        with seen.own_fault("activity unknown"):
            await self._see_activity(seen)
        updates = list(gathered.updates)
        with seen.own_fault("no update evaluated"):
            block_hash = await self._comms.window_hash(gathered.window + 1)
            seed = evaluation_seed(hotkey=self._comms.hotkey, block_hash=block_hash)
            updates += await self._sample_evaluated(seen, peer_scores, seed)
            await self._compare(seen, updates, seed)
            # Before anybody is on the list, the norms of all that were fetched are all there is.
            applied = [one.update for one in gathered.updates or updates]
            await asyncio.to_thread(self._train_state.set_caps, applied)
            await self._measure(seen, updates, seed)
        with seen.own_fault("sync unknown"):
            await self._see_reports(seen)
        return seen

    def _miners(self, peer_scores: Mapping[int, PeerScore]) -> dict[int, PeerObservation]:
        """Registered uids with a miner's stake that have a bucket or a score."""
        return {
            neuron.uid: PeerObservation(hotkey=neuron.hotkey)
            for neuron in self._comms.metagraph.neurons
            if neuron.stake <= self._hparams.eval_stake_limit
            and (neuron.uid in self._comms.commitments or neuron.uid in peer_scores)
        }

    def _note_verdicts(self, seen: Observation, gathered: GatherResult[Update], *, listed: bool) -> None:
        for uid in [one.uid for one in gathered.updates]:
            seen.note(uid, listed=listed, verdict=VALID)
        for uid, reason in gathered.skipped.items():
            seen.note(uid, listed=listed, verdict=reason.value)

    async def _see_activity(self, seen: Observation) -> None:
        groups = await self._comms.track_active_peers(seen.window + 1)
        for uid in seen.observations:
            if uid not in groups.unknown:
                seen.note(uid, active=uid in groups.active)

    async def _sample_evaluated(
        self, seen: Observation, peer_scores: Mapping[int, PeerScore], seed: int
    ) -> tuple[GatheredUpdate[Update], ...]:
        """Sample the uids to evaluate, and fetch the updates of those that are not on the peer list."""
        pool = [uid for uid, one in seen.observations.items() if one.active or one.verdict == VALID]
        kept = {uid: peer_scores[uid] for uid in pool if uid in peer_scores}
        chosen = choose_evaluated(
            pool,
            {uid: peer_score.final for uid, peer_score in kept.items()},
            {uid: peer_score.waiting for uid, peer_score in kept.items()},
            window=seen.window,
            count=self._hparams.uids_per_window,
            bins=self._hparams.evaluation_bins,
            seed=seed,
        )
        for uid in chosen:
            seen.note(uid, chosen=True)
        unlisted = [uid for uid in chosen if not seen.observations[uid].listed]
        more = await self._comms.gather_updates(unlisted, seen.window, self._train_state.outer.spec)
        self._note_verdicts(seen, more, listed=False)
        return more.updates

    async def _compare(self, seen: Observation, updates: Sequence[GatheredUpdate[Update]], seed: int) -> None:
        """Record copied and oversized updates."""
        for one in updates:
            digest = await self._data_loader.digest(one.uid, seen.window)
            seen.note(one.uid, own_pages=one.update.pages_digest == digest)
        previous, self._previous = self._previous, tuple(one.update for one in updates)
        fixed = await self._fixed_times(updates, seen.window)
        notes = await asyncio.to_thread(compare, updates, previous, fixed, derive("compared-chunks", seed))
        for uid, note in notes.items():
            seen.note(uid, **note)

    async def _fixed_times(self, updates: Sequence[GatheredUpdate[Update]], window: int) -> dict[int, float | None]:
        """When the bytes of each update were fixed, in unix seconds of its store; None if unknown."""
        make_key = commit_key if self._hparams.require_commit else gradient_key

        async def one(uid: int) -> float | None:
            store = self._comms.store_of(uid)
            key = make_key(window, uid, self._hparams.version)
            try:
                return None if store is None else (await store.head(key)).last_modified
            except StoreError:
                return None

        async with asyncio.TaskGroup() as group:
            # Updates of a published set come without this time.
            tasks = {update.uid: group.create_task(one(update.uid)) for update in updates if not update.fixed}
        return {update.uid: update.fixed or tasks[update.uid].result() for update in updates}

    async def _measure(self, seen: Observation, updates: Iterable[GatheredUpdate[Update]], seed: int) -> None:
        """Losses before and after each chosen update, on its assigned and on held-out pages."""
        chosen = [one for one in updates if (m := seen.observations.get(one.uid)) and m.chosen and m.own_pages]
        held_out = await self._data_loader.held_out(seen.window, self._comms.hotkey, [one.uid for one in chosen])
        if chosen:
            self._data_loader.read_ahead(chosen[0].uid, seen.window)
        batches = sample_batches(held_out, seed, self._hparams)
        before = await asyncio.to_thread(self._train_state.baseline, batches)
        seen.random_pages = held_out.digest
        self._telemetry.emit("baseline", window=seen.window, held_out_loss=float(before.losses.mean()))
        for one, following in zip(chosen, [*chosen[1:], None], strict=False):
            with seen.own_fault(f"uid {one.uid} not evaluated"):
                assigned = await self._data_loader.assigned(one.uid, seen.window)
                batches = sample_batches(assigned, seed, self._hparams)
                if following is not None:
                    self._data_loader.read_ahead(following.uid, seen.window)
                measured = await asyncio.to_thread(self._train_state.evaluate, one.update, batches, before)
                seen.note(one.uid, evaluation=measured)
                self._telemetry.emit(
                    "evaluated",
                    window=seen.window,
                    peer=one.uid,
                    assigned_before=measured.own_before,
                    assigned_after=measured.own_after,
                    held_out_before=measured.random_before,
                    held_out_after=measured.random_after,
                    score=gradient_score(measured),
                )

    async def _see_reports(self, seen: Observation) -> None:
        """Record how many steps each miner is behind, by its reports, compared with this validator's model."""
        newest = seen.window - 1
        if newest < self._train_state.start_window:
            return
        block_hash = await self._comms.window_hash(seen.window)
        asked = [uid for uid, one in seen.observations.items() if one.listed or one.chosen]
        self._proofs[newest] = await asyncio.to_thread(self._expected, asked, newest, block_hash)
        for old in [window for window in self._proofs if window < newest - self._hparams.sync_max_steps_behind]:
            del self._proofs[old]
        slots = asyncio.Semaphore(CONCURRENCY)

        async def note(uid: int) -> None:
            async with slots:
                seen.note(uid, behind=await self._behind(uid, newest))

        async with asyncio.TaskGroup() as group:
            for uid in asked:
                group.create_task(note(uid))

    def _expected(self, uids: Iterable[int], window: int, block_hash: str) -> dict[int, str]:
        return {
            uid: self._train_state.fingerprint(proof_seed(uid=uid, window=window, block_hash=block_hash))
            for uid in uids
        }

    async def _behind(self, uid: int, newest: int) -> int | None:
        """Windows between ``newest`` and the last one that ``uid`` has a valid proof for; None if unknown."""
        oldest = max(self._train_state.start_window, newest - self._hparams.sync_max_steps_behind)
        for window in range(newest, oldest - 1, -1):
            try:
                report = await with_retry(
                    lambda window=window: self._comms.get_report(uid, window), deadline_seconds=REPORT_SECONDS
                )
            except ObjectNotFound:
                continue
            except PayloadError:
                return OUT_OF_SYNC
            except StoreError:
                return None
            expected = self._proofs.get(window, {}).get(uid)
            if expected is None:
                return None
            return newest - window if report.proof == expected else OUT_OF_SYNC
        return OUT_OF_SYNC


def compare(
    updates: Sequence[GatheredUpdate[Update]],
    previous: Sequence[Update],
    fixed: Mapping[int, float | None],
    seed: int,
) -> dict[int, dict[str, Any]]:
    """Compare all updates. Returns fields of ``PeerObservation`` by uid. Blocks."""
    if not updates:
        return {}
    sample = sample_chunks(updates[0].update.spec, seed)
    now = {one.uid: traits(one.update, sample) for one in updates}
    before = {update.uid: traits(update, sample) for update in previous}
    copies = find_copies(now, before, fixed)
    median = statistics.median_low(one.norm for one in now.values())
    return {
        uid: {
            "copied": copies[uid].rule if uid in copies else "",
            "copied_from": copies[uid].source if uid in copies else None,
            "norm_ratio": one.norm / median if median > 0 else None,
        }
        for uid, one in now.items()
    }


def score_report(
    seen: Observation, outcome: Outcome, board: ScoreBoard, *, uid: int, weights_set: WeightsSet | None
) -> ScoreReport:
    """The score report that validator ``uid`` publishes."""
    return ScoreReport(
        window=seen.window,
        uid=uid,
        profile=board.hparams.profile,
        random_pages=seen.random_pages,
        faults=tuple(seen.faults),
        observations={str(uid): one for uid, one in sorted(seen.observations.items())},
        peer_scores={str(uid): one for uid, one in sorted(outcome.peer_scores.items())},
        struck={str(uid): codes for uid, codes in sorted(outcome.struck.items())},
        weights={str(uid): weight for uid, weight in board.weights.items()},
        weights_set=weights_set,
    ).sealed()


def sample_batches(pages: WindowBatches, seed: int, hparams: HParams) -> np.ndarray:
    """The batches that are evaluated: a share ``validator_sample_rate``, and at least ``evaluation_sequences``.

    Returns:
        int64 (batches, batch_size, sequence_length), chosen by ``seed``.

    Raises:
        DataError: the list holds no batch.
    """
    total = len(pages.batches)
    if total == 0:
        raise DataError("the pages hold less text than one batch: raise pages_per_window or lower batch_size")
    share = math.ceil(total * hparams.validator_sample_rate)
    count = max(share, math.ceil(hparams.evaluation_sequences / pages.batches.shape[1]))
    order = sorted(range(total), key=lambda i: derive("batch", seed, pages.digest, i))
    return pages.batches[sorted(order[:count])]
