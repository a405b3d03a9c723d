"""A validator: follow the model some windows behind, measure each miner's update, pay on chain; lead if it is first."""

import asyncio
import math

import numpy as np

from tplr.compress.payload import Update
from tplr.errors import ChainError, ChainUnavailable, DataError, StoreError
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.feed import PageBatches, PageFeed
from tplr.node.leader import Leader
from tplr.node.replica import Borders, Replica
from tplr.scoring.board import ScoreBoard
from tplr.scoring.measures import Measurement, gradient_score
from tplr.scoring.selection import choose_evaluated
from tplr.scoring.weights import power_normalise
from tplr.seeds import derive, evaluation_seed
from tplr.training.loss import mean_loss


class Validator:
    """One validator's work, window by window."""

    def __init__(self, replica: Replica, feed: PageFeed, borders: Borders, hparams: HParams) -> None:
        self._replica = replica
        self._feed = feed
        self._comms = borders.comms
        self._clock = borders.clock
        self._telemetry = borders.telemetry
        self._hparams = hparams
        self._board = ScoreBoard(alpha=hparams.binary_score_ma_alpha)
        self._leader = Leader(borders, hparams)
        self._next_weights = 0
        replica.keep("scores", self._board)

    async def run(self) -> None:
        """Work until cancelled."""
        await self._replica.open(await self._leader.start_window())
        async with asyncio.TaskGroup() as group:
            await self._follow(group)

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        paying: asyncio.Task[None] | None = None
        async for tick in self._clock.ticks():
            await self._leader.renew_peers(tick.window, self._replica.start_window, self._board.scores)
            complete = tick.window - self._hparams.validator_offset
            # After an absence only the newest window is measured: the others are applied to catch up.
            await self._replica.advance(until=complete)
            if self._replica.window == complete:
                with in_window(complete):
                    await self._judge()
            # The chain may take its time, and the next window does not wait for it.
            if tick.window >= self._next_weights and (paying is None or paying.done()):
                paying = group.create_task(self._set_weights(tick.window))

    async def _judge(self) -> None:
        """Gather one window, measure some of its updates against the model as it was, then apply them all."""
        window = self._replica.window
        gathered = await self._replica.gather()
        try:
            await self._measure(gathered)
        except (ChainUnavailable, DataError, StoreError) as error:
            # Our own fault: nobody's score moves.
            logger.warning("nobody is measured in window %d: %s", window, error)
            self._telemetry.emit("problem", text=f"not measured: {error}")
        await self._replica.apply(gathered)

    async def _measure(self, gathered: GatherResult[Update]) -> None:
        window = gathered.window
        hotkeys = {neuron.uid: neuron.hotkey for neuron in self._comms.metagraph.neurons}
        seed = evaluation_seed(hotkey=self._comms.hotkey, block_hash=await self._comms.window_hash(window + 1))
        self._board.follow(hotkeys)
        chosen = choose_evaluated(
            [one.uid for one in gathered.updates if one.uid in hotkeys],
            {uid: entry.last_window for uid, entry in self._board.entries.items()},
            self._hparams.uids_per_window,
            seed=seed,
        )
        random = self._sample(await self._feed.random(window), seed)
        random_before = await asyncio.to_thread(self._loss, random)
        self._telemetry.emit("baseline", window=window, random_loss=random_before)
        measured = []
        for one in gathered.updates:
            if one.uid not in chosen:
                continue
            pages = await self._feed.own(one.uid, window)
            if one.update.pages_digest != pages.digest:
                logger.warning(
                    "uid %d: not measured: its update names other pages, or another dataset, than it was given", one.uid
                )
                continue
            own = self._sample(pages, seed)
            measured.append(await asyncio.to_thread(self._evaluate, one, own, random, random_before))
        for one in measured:
            self._telemetry.emit(
                "evaluated",
                window=window,
                peer=one.uid,
                own_before=one.own_before,
                own_after=one.own_after,
                random_before=one.random_before,
                random_after=one.random_after,
                score=gradient_score(one),
            )
        self._board.record(window, measured, hotkeys)
        self._telemetry.emit("scores", window=window, scores={str(uid): s for uid, s in self._board.scores.items()})

    def _sample(self, pages: PageBatches, seed: int) -> np.ndarray:
        """This validator's share of the batches of a page list, at least one, by seed."""
        total = len(pages.batches)
        if total == 0:
            raise DataError("the pages hold less text than one batch: raise pages_per_window or lower batch_size")
        count = max(1, math.ceil(total * self._hparams.validator_sample_rate))
        order = sorted(range(total), key=lambda i: derive("batch", seed, pages.digest, i))
        return pages.batches[sorted(order[:count])]

    def _evaluate(
        self, one: GatheredUpdate[Update], own: np.ndarray, random: np.ndarray, random_before: float
    ) -> Measurement:
        own_before = self._loss(own)
        with self._replica.outer.probe(one.update, step=self._replica.step):
            own_after, random_after = self._loss(own), self._loss(random)
        return Measurement(
            uid=one.uid,
            own_before=own_before,
            own_after=own_after,
            random_before=random_before,
            random_after=random_after,
        )

    def _loss(self, batches: np.ndarray) -> float:
        return mean_loss(self._replica.model, batches, self._hparams.precision)

    async def _set_weights(self, window: int) -> None:
        weights = power_normalise(self._board.scores, self._hparams.power_normalisation)
        if not weights:
            logger.info("no weights to set: nobody has a score above 0 yet")
            return
        try:
            block = await self._comms.set_weights(weights)
        except ChainError as error:
            logger.warning("weights not set: %s", error)
            self._telemetry.emit("problem", text=f"weights not set: {error}")
            return
        self._next_weights = window + self._hparams.windows_per_weights
        logger.info("weights set in block %d: %s", block, {uid: round(weight, 4) for uid, weight in weights.items()})
        self._telemetry.emit("weights", block=block, weights={str(uid): weight for uid, weight in weights.items()})
