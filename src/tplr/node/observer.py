"""A validator's observations of a window: one record for each miner, and the products of all measured updates.

A failure on the validator's own side leaves fields unset and adds a line to ``faults``.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tplr.compress.payload import Update
from tplr.errors import DataError
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.hparams import HParams
from tplr.node.data_loader import WindowBatches, WindowDataLoader
from tplr.node.documented_copies import note_copies
from tplr.node.observation import Observation
from tplr.node.replica import NodeContext
from tplr.node.sync_proofs import SyncProofs
from tplr.node.train_state import TrainState
from tplr.schemas import PRODUCT_DECIMALS, VALID, Alignment, PeerObservation, Reason, published
from tplr.scoring.measures import measured_gain
from tplr.scoring.own_pages import FEWEST_OTHERS, deviations
from tplr.scoring.profiles import ScoreBoard
from tplr.scoring.selection import evaluated_by_loss
from tplr.seeds import derive, evaluation_seed
from tplr.training.alignment import Alignment as Aligned
from tplr.training.evaluation import Baseline

Updates = Sequence[GatheredUpdate[Update]]
# The validator's own faults that explain a missing measurement.
NO_HOTKEYS, NO_PROBATION, NOT_MEASURED, NOT_EVALUATED = (
    "hotkeys not compared",
    "updates on probation not measured",
    "no update measured",
    "uid {uid} not evaluated",
)


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
        self._sync = SyncProofs(train_state, context.comms, hparams)

    async def observe(self, gathered: GatherResult[Update], board: ScoreBoard) -> Observation:
        """Observe the next window to apply, whose updates are ``gathered``."""
        seen = Observation(gathered.window, self._miners(board))
        with seen.own_fault(NO_HOTKEYS):
            await self._leave_out_newcomers(seen)
        _note_verdicts(seen, gathered, listed=True, included=True)
        observe = self._observe_documented if self._hparams.profile == "documented" else self._observe
        await observe(seen, gathered.updates, board)
        with seen.own_fault("sync unknown"):
            asked = [uid for uid, one in seen.observations.items() if one.listed or one.probation or one.sampled]
            await self._sync.note(seen, asked)
        return seen

    def _miners(self, board: ScoreBoard) -> dict[int, PeerObservation]:
        """Return the registered uids with at most a miner's stake that have a bucket or a score."""
        return {
            neuron.uid: PeerObservation(hotkey=neuron.hotkey)
            for neuron in self._comms.metagraph.neurons
            if neuron.stake <= self._hparams.eval_stake_limit
            and (neuron.uid in self._comms.commitments or neuron.uid in board.peer_scores)
        }

    async def _leave_out_newcomers(self, seen: Observation) -> None:
        """Who has registered since the window's end answers for nothing that the owner of its uid before did."""
        then = await self._comms.hotkeys_in(seen.window)
        for uid in [uid for uid, one in seen.observations.items() if then.get(uid) != one.hotkey]:
            del seen.observations[uid]

    async def _observe(self, seen: Observation, included: Updates, board: ScoreBoard) -> None:
        """Measure all updates, of the included set and on probation, and evaluate the sampled ones."""
        updates = list(included)
        with seen.own_fault(NO_PROBATION):
            updates += await self._fetch_probation(seen)
        with seen.own_fault(NOT_MEASURED):
            seed = await self._seed(seen.window)
            await self._note_pages(seen, updates)
            valid = sorted(_with_own_pages(seen, updates), key=lambda one: one.uid)
            pool = {one.uid: seen.observations[one.uid].hotkey for one in valid}
            sampled = self._note_sampled(seen, board.sample(pool, seen.window, seed))
            held_out = await self._held_out(seen, sampled, seed)
            if valid:
                all_updates = [one.update for one in valid]
                # While the list is empty, only the norms of all measured updates are available.
                await self._set_caps(included or valid)
                before, found = await asyncio.to_thread(self._train_state.align, all_updates, held_out, seed)
                self._note_baseline(seen, before)
                middle = await self._middle(included, all_updates, before, seed)
                seen.alignment = Alignment(
                    uids=found.uids,
                    products=published(found.products),
                    middle=published(middle.products_in(found.unit) if middle else ()),
                    norms=tuple(round(one, PRODUCT_DECIMALS) for one in found.norms),
                    gram=published(found.gram),
                    unit=found.unit,
                    largest_norm=found.largest_norm,
                    loss=before.loss,
                )
                await self._evaluate(seen, valid, before, seed)

    async def _middle(
        self, included: Updates, updates: Sequence[Update], before: Baseline, seed: int
    ) -> Aligned | None:
        """Align updates with the gradient after half of the window's step; None if there is no step."""
        if not included:
            return None
        step = [one.update for one in included]
        return await asyncio.to_thread(self._train_state.middle_alignment, step, updates, before.for_middle(), seed)

    async def _observe_documented(self, seen: Observation, included: Updates, board: ScoreBoard) -> None:
        """Evaluate the sampled updates, on the peer list or not, and find copies."""
        with seen.own_fault("activity unknown"):
            groups = await self._comms.track_active_peers(seen.window + 1)
            for uid in seen.observations:
                if uid not in groups.unknown:
                    seen.note(uid, active=uid in groups.active)
        with seen.own_fault("no update evaluated"):
            seed = await self._seed(seen.window)
            pool = {uid: one.hotkey for uid, one in seen.observations.items() if one.active or one.verdict == VALID}
            sampled = self._note_sampled(seen, board.sample(pool, seen.window, seed))
            more = await self._fetch(seen, [uid for uid in sampled if not seen.observations[uid].listed])
            _note_verdicts(seen, more)
            updates = [*included, *more.updates]
            await self._note_pages(seen, updates)
            await note_copies(seen, updates, self._comms, self._hparams, derive("compared-chunks", seed))
            await self._set_caps(included or updates)
            held_out = await self._held_out(seen, sampled, seed)
            before = await asyncio.to_thread(self._train_state.baseline, held_out)
            self._note_baseline(seen, before)
            await self._evaluate(seen, _with_own_pages(seen, updates), before, seed)

    async def _seed(self, window: int) -> int:
        """Return the seed of all random choices after a window."""
        block_hash = await self._comms.window_hash(window + 1)
        return evaluation_seed(hotkey=self._comms.hotkey, block_hash=block_hash)

    async def _fetch(self, seen: Observation, uids: Iterable[int]) -> GatherResult[Update]:
        return await self._comms.gather_updates(uids, seen.window, self._train_state.outer.spec)

    async def _fetch_probation(self, seen: Observation) -> Updates:
        """Fetch the updates of miners on probation, and of miners that are excluded until the next list.

        The newest list is read as well, even if it is not yet in effect, to measure a newcomer from its first window.
        """
        lists = [await self._comms.get_peer_list(seen.window), await self._comms.get_peer_list()]
        named = {uid for one in lists if one for uid in (*one.peers, *one.reserve_peers, *one.probation)}
        excluded = {uid for uid, one in seen.observations.items() if one.verdict == Reason.EXCLUDED}
        judged = {uid for uid, one in seen.observations.items() if one.listed} - excluded
        more = await self._fetch(seen, sorted(named.intersection(seen.observations) - judged))
        _note_verdicts(seen, more, probation=True)
        return more.updates

    async def _set_caps(self, updates: Updates) -> None:
        """Use the norm caps of these updates, so that steps are measured as they are applied."""
        await asyncio.to_thread(self._train_state.set_caps, [one.update for one in updates])

    async def _note_pages(self, seen: Observation, updates: Updates) -> None:
        """Record, for each update, whether it names the pages assigned to its uid."""
        for one in updates:
            digest = await self._data_loader.digest(one.uid, seen.window)
            seen.note(one.uid, assigned_pages=one.update.pages_digest == digest)

    def _note_sampled(self, seen: Observation, uids: Sequence[int]) -> Sequence[int]:
        for uid in uids:
            seen.note(uid, sampled=True)
        return uids

    async def _held_out(self, seen: Observation, sampled: Iterable[int], seed: int) -> np.ndarray:
        """Load batches of the held-out pages, int64 (batches, batch_size, sequence_length)."""
        pages = await self._data_loader.held_out(seen.window, self._comms.hotkey, sampled)
        seen.held_out_pages = pages.digest
        return sample_batches(pages, seed, self._hparams)

    def _note_baseline(self, seen: Observation, before: Baseline) -> None:
        self._telemetry.emit("baseline", window=seen.window, held_out_loss=before.loss)

    async def _evaluate(self, seen: Observation, updates: Updates, before: Baseline, seed: int) -> None:
        """Evaluate those of these updates that are sampled."""
        chosen = [one for one in updates if (m := seen.observations.get(one.uid)) and m.sampled]
        by_loss = evaluated_by_loss((one.uid for one in chosen), seed=seed)
        if chosen:
            self._data_loader.read_ahead(chosen[0].uid, seen.window)
        for one, following in zip(chosen, [*chosen[1:], None], strict=False):
            with seen.own_fault(NOT_EVALUATED.format(uid=one.uid)):
                assigned = await self._data_loader.assigned(one.uid, seen.window)
                batches = sample_batches(assigned, seed, self._hparams)
                if following is not None:
                    self._data_loader.read_ahead(following.uid, seen.window)
                tested = await self._test_own_pages(seen, one.uid, updates, batches, seed)
                if not tested or one.uid in by_loss:
                    await self._measure_loss(seen, one, None if tested else batches, before)

    async def _test_own_pages(
        self, seen: Observation, uid: int, updates: Updates, batches: np.ndarray, seed: int
    ) -> bool:
        """Run the own-pages test of ``uid``; return whether there are enough updates for it."""
        if seen.alignment is None or len(updates) <= FEWEST_OTHERS + 1:
            return False
        all_updates = [one.update for one in updates]
        products = await asyncio.to_thread(self._train_state.own_alignment, all_updates, batches, seed)
        seen.note(uid, assigned_products=published(products))
        included = {one for one, measured in seen.observations.items() if measured.included}
        return (uid, uid) in deviations({uid: published(products)}, seen.alignment, included, only=uid)

    async def _measure_loss(
        self, seen: Observation, one: GatheredUpdate[Update], assigned: np.ndarray | None, before: Baseline
    ) -> None:
        measured = await asyncio.to_thread(self._train_state.evaluate, one.update, assigned, before)
        seen.note(one.uid, evaluation=measured)
        change = measured.assigned
        self._telemetry.emit(
            "evaluated",
            window=seen.window,
            peer=one.uid,
            assigned_before=change and change.before,
            assigned_after=change and change.after,
            held_out_before=measured.held_out.before,
            held_out_after=measured.held_out.after,
            score=measured_gain(measured),
        )


def _note_verdicts(seen: Observation, gathered: GatherResult[Update], *, included: bool = False, **notes: bool) -> None:
    for one in gathered.updates:
        seen.note(one.uid, verdict=VALID, included=included, **notes)
    for uid, reason in gathered.skipped.items():
        seen.note(uid, verdict=reason.value, **notes)


def _with_own_pages(seen: Observation, updates: Updates) -> Updates:
    """Return the updates that name the pages assigned to their uid."""
    return [one for one in updates if (m := seen.observations.get(one.uid)) and m.assigned_pages]


def sample_batches(pages: WindowBatches, seed: int, hparams: HParams) -> np.ndarray:
    """Sample batches for evaluation: a share ``validator_sample_rate``, and at least ``evaluation_sequences``.

    Returns:
        int64 (batches, batch_size, sequence_length), chosen by ``seed``.

    Raises:
        DataError: ``pages`` hold no batch.
    """
    total = len(pages.batches)
    if total == 0:
        raise DataError("the pages contain less text than one batch: raise pages_per_window or lower batch_size")
    share = math.ceil(total * hparams.validator_sample_rate)
    count = max(share, math.ceil(hparams.evaluation_sequences / pages.batches.shape[1]))
    order = sorted(range(total), key=lambda i: derive("batch", seed, pages.digest, i))
    return pages.batches[sorted(order[:count])]
