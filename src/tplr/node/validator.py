"""A validator: follows the model some windows behind, scores updates, sets weights, and votes if it is an elector."""

import asyncio
from collections.abc import Sequence

from tplr.errors import WindowLost
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.data_loader import WindowDataLoader
from tplr.node.elector import Elector
from tplr.node.failpoints import failpoint
from tplr.node.leader import Leader
from tplr.node.observation import Observation, score_report
from tplr.node.observer import Observer
from tplr.node.payment import Payment
from tplr.node.replica import NodeContext, Replica
from tplr.node.score_reports import ScoreReports
from tplr.scoring.board import Outcome
from tplr.scoring.profiles import score_board


class Validator:
    """The work of one validator, window by window."""

    def __init__(self, replica: Replica, data_loader: WindowDataLoader, context: NodeContext, hparams: HParams) -> None:
        self._replica = replica
        self._context = context
        self._comms = context.comms
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._hparams = hparams
        self._board = score_board(hparams)
        self._observer = Observer(replica.train_state, data_loader, context, hparams)
        self._payment = Payment(context, hparams)
        self._leader = Leader(context, hparams, replica.folder / "aggregates" / "start")
        self._reports = ScoreReports(context.comms, context.telemetry, hparams, replica.folder / "scores")
        self._scored = -1  # the newest scored window
        self._resumed = False  # whether the board has what was scored after the saved state
        self._unpaid_windows = 0  # number of consecutive windows without a miner's score, measured without a fault
        replica.register("scores", self._board)
        replica.register("leader", self._leader)

    async def run(self) -> None:
        """Run until cancelled."""
        start = await self._leader.start_window()
        await self._replica.open(start)
        async with asyncio.TaskGroup() as group:
            if self._hparams.manifest_timeout_seconds:
                folder, spec = self._replica.folder / "aggregates", self._replica.train_state.outer.spec
                elector = Elector(self._context, self._hparams, spec, folder, leader=self._leader)
                group.create_task(elector.run(start))
            await self._follow(group)

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        paying: asyncio.Task[None] | None = None
        times = self._replica.times
        times.take()
        async for tick in self._clock.ticks():
            complete = tick.window - self._hparams.validator_offset
            with times.phase("other"):
                # During catch-up, windows are only applied; only the newest one is scored.
                await self._replica.advance(until=complete)
                if self._replica.window == complete:
                    with in_window(complete):
                        await self._score()
                await self._leader.renew_peers(tick.window, self._replica.train_state.start_window, self._board)
            seconds = times.take()
            self._telemetry.emit("window_time", window=complete, seconds=sum(seconds.values()), **seconds)
            # Setting weights can take several blocks; the next window does not wait for it.
            if paying is None or paying.done():
                paying = group.create_task(self._pay(tick.window))

    async def _pay(self, window: int) -> None:
        """Set weights if they are due, and publish the score reports that may be published now."""
        weights = self._board.weights
        if self._payment.due(window, weights):
            await self._payment.pay(window, weights, scored=self._scored, unpaid_windows=self._unpaid_windows)
        await self._reports.release(await self._payment.in_force(), newest=window)

    async def _score(self) -> None:
        """Gather a window, evaluate its updates on the model before it, score, and apply the window.

        A window that can't be gathered does not change scores; ``advance`` skips it.
        """
        await self._resume()
        try:
            gathered = await self._replica.gather()
        except WindowLost as lost:
            logger.error("no scores: %s", lost)
            self._telemetry.emit("problem", text=f"no scores: {lost}")
            return
        if kept := await self._reports.kept(gathered.window):
            # This validator was killed before it applied the window; the published hash binds it to that report.
            self._note(kept.window, await asyncio.to_thread(self._board.see, kept.evidence), again=True)
        else:
            with self._replica.times.phase("evaluating"):
                seen = await self._observer.observe(gathered, self._board)
            await failpoint("observed")
            outcome = await asyncio.to_thread(self._board.see, seen.evidence)  # seconds for 256 miners
            for fault in seen.faults:
                self._telemetry.emit("problem", text=fault)
            self._note(seen.window, outcome, seen.faults)
            await self._publish(seen, outcome)
        await failpoint("scored")
        await self._replica.apply(gathered)

    async def _resume(self) -> None:
        """Once after a start: see the evidence of windows that this validator scored after its saved state."""
        if self._resumed:
            return
        self._resumed, window = True, self._replica.window
        after = max(self._board.newest, window - self._hparams.pay_windows)
        for report in await self._reports.made(range(after + 1, window)):
            outcome = await asyncio.to_thread(self._board.see, report.evidence)
            self._note(report.window, outcome, report.faults, again=True)

    def _note(self, window: int, outcome: Outcome, faults: Sequence[str] = (), *, again: bool = False) -> None:
        """Take over and emit a window's scores; ``again``: it was scored before a restart, and its strikes counted."""
        self._scored = window
        self._unpaid_windows = 0 if self._board.weights else self._unpaid_windows + (not faults)
        self._leader.see(window, self._board, outcome.struck)
        self._telemetry.emit(
            "scores",
            window=window,
            scores={str(uid): final for uid, final in self._board.finals.items()},
            struck={} if again else {str(uid): codes for uid, codes in outcome.struck.items()},
            faults=faults,
        )

    async def _publish(self, seen: Observation, outcome: Outcome) -> None:
        report = score_report(seen, outcome, self._board, uid=self._comms.uid, weights_set=self._payment.last)
        await self._reports.publish(report, weights_due=self._payment.next_due(self._clock.window))
