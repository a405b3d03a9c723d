"""A validator: follow the model some windows behind, look at what each miner sent, score, pay; lead if it is first."""

import asyncio

from tplr.errors import StoreError, WindowLost
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.aggregator import Aggregator
from tplr.node.data_loader import WindowDataLoader
from tplr.node.failpoints import failpoint
from tplr.node.leader import Leader
from tplr.node.observer import Observation, Observer, score_report
from tplr.node.payment import Payment
from tplr.node.replica import NodeContext, Replica
from tplr.scoring.board import Constants, Outcome, ScoreBoard


class Validator:
    """One validator's work, window by window."""

    def __init__(self, replica: Replica, data_loader: WindowDataLoader, context: NodeContext, hparams: HParams) -> None:
        self._replica = replica
        self._context = context
        self._comms = context.comms
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._hparams = hparams
        self._board = ScoreBoard(Constants.of(hparams))
        self._observer = Observer(replica.train_state, data_loader, context, hparams)
        self._payment = Payment(context, hparams)
        self._leader = Leader(context, hparams)
        replica.keep("scores", self._board)

    async def run(self) -> None:
        """Work until cancelled."""
        await self._replica.open(await self._leader.start_window())
        async with asyncio.TaskGroup() as group:
            if self._comms.aggregates_itself and self._hparams.manifest_timeout_seconds:
                folder = self._replica.folder / "aggregates"
                spec = self._replica.train_state.outer.spec
                aggregator = Aggregator(self._context, self._hparams, spec, folder, in_validator=True)
                group.create_task(aggregator.run())
            await self._follow(group)

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        paying: asyncio.Task[None] | None = None
        async for tick in self._clock.ticks():
            await self._leader.renew_peers(tick.window, self._replica.train_state.start_window, self._board.weights)
            complete = tick.window - self._hparams.validator_offset
            # After an absence only the newest window is judged: the others are applied to catch up.
            await self._replica.advance(until=complete)
            if self._replica.window == complete:
                with in_window(complete):
                    await self._judge()
            # The chain may take its time, and the next window does not wait for it.
            if self._payment.due(tick.window) and (paying is None or paying.done()):
                paying = group.create_task(self._payment.pay(tick.window, self._board.weights))

    async def _judge(self) -> None:
        """Gather a window, look at it with the model as it was, score, and apply: in this order, in all cases.

        By a window that can't be had nobody is judged; ``advance`` knows how to go on from there.
        """
        try:
            gathered = await self._replica.gather()
        except WindowLost as lost:
            logger.error("nobody is judged: %s", lost)
            self._telemetry.emit("problem", text=f"nobody is judged: {lost}")
            return
        seen = await self._observer.look(gathered, self._board.peer_scores)
        await failpoint("looked")
        outcome = self._board.see(seen.observations, seen.window)
        await self._report(seen, outcome)
        await failpoint("scored")
        await self._replica.apply(gathered)

    async def _report(self, seen: Observation, outcome: Outcome) -> None:
        for fault in seen.faults:
            self._telemetry.emit("problem", text=fault)
        self._telemetry.emit(
            "scores",
            window=seen.window,
            scores={str(uid): final for uid, final in self._board.finals.items()},
            struck={str(uid): codes for uid, codes in outcome.struck.items()},
            faults=seen.faults,
        )
        report = score_report(seen, outcome, self._board, uid=self._comms.uid, weights_set=self._payment.last)
        try:
            await self._comms.put_scores(report)
        except StoreError as error:
            logger.warning("scores of this window not published: %s", error)
            self._telemetry.emit("problem", text=f"scores not published: {error}")
