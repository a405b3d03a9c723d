"""A miner: trains on the window's pages, publishes its update and applies the window's updates."""

import asyncio
import hashlib
import time
from contextlib import AsyncExitStack
from functools import partial

from tplr.clock import Tick
from tplr.errors import ChainUnavailable, DataError, StoreError, TrainingError
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.data_loader import WindowBatches, WindowDataLoader
from tplr.node.failpoints import failpoint
from tplr.node.leader import start_window
from tplr.node.replica import NodeContext, Replica
from tplr.node.window_time import ModelSpeed, WindowTime
from tplr.schemas import Reason, UploadBounds
from tplr.telemetry.events import Cause
from tplr.training.local import TrainStats
from tplr.training.profile import WindowProfile


class Miner:
    """The work of one uid, window by window."""

    def __init__(
        self,
        replica: Replica,
        data_loader: WindowDataLoader,
        context: NodeContext,
        hparams: HParams,
        *,
        speed: ModelSpeed | None = None,
        profile: WindowProfile | None = None,
    ) -> None:
        """``profile`` runs each window's training."""
        self._replica = replica
        self._train_state = replica.train_state
        self._data_loader = data_loader
        self._context = context
        self._comms = context.comms
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._hparams = hparams
        overlap = hparams.outer_delay > 0
        replica.beside_training = overlap
        # Times of training and of everything that it waits for; work that overlaps with it is not counted.
        self._times = WindowTime() if overlap else replica.times
        self._speed = speed
        self._profile = profile
        self._training: int | None = None  # the window being trained
        self._tokens = 0  # tokens trained in the window so far

    async def run(self) -> None:
        """Run until cancelled."""
        await self._replica.open(await start_window(self._context, self._hparams.start_horizon_windows))
        self._times.take()
        if self._hparams.outer_delay:
            async with asyncio.TaskGroup() as group:
                await self._overlapped(group)
        else:
            await self._in_turn()

    async def _in_turn(self) -> None:
        """Alternate between applying a window and training the next one."""
        async for tick in self._clock.ticks():
            if tick.window < self._train_state.start_window:
                continue
            with self._times.phase("other"):
                await self._process(tick)
            self._report_times(tick.window)

    async def _process(self, tick: Tick) -> None:
        """Apply the windows before ``tick.window``, then train that window and publish its update."""
        for missed in range(max(tick.window - tick.missed, self._train_state.start_window), tick.window):
            self._miss(missed, "still processing earlier windows", "behind")
        await self._replica.advance(until=tick.window)
        if self._clock.window > tick.window:
            self._miss(tick.window, "catch-up ended after the window", "behind")
            return
        if body := await self._make_update(tick.window):
            await self._put_out(tick.window, body)

    async def _overlapped(self, group: asyncio.TaskGroup) -> None:
        """Train each window as soon as the previous one is packed; publish and apply that one concurrently.

        The model that a training starts from lacks at most one window.
        """
        window = await self._clock.wait_for_window(self._train_state.start_window)
        published = applied = None  # tasks of the previous window
        while True:
            if applied is None:
                await self._replica.advance(until=window)
            if (now := self._clock.window) > window:
                for missed in range(window, now):
                    self._miss(missed, "still processing earlier windows", "behind")
                await asyncio.gather(*filter(None, (published, applied)))
                window, published, applied = now, None, None
                continue
            await self._wait_until_due(window)
            with self._times.phase("other"):
                body = await self._make_update(window, after=published)
                published = group.create_task(self._put_out(window, body)) if body else None
                with self._times.phase("gathering"):
                    await (applied or asyncio.sleep(0))
                applied = group.create_task(self._apply_when_over(window, published))
            self._report_times(window)
            window += 1

    async def _wait_until_due(self, window: int) -> None:
        """Wait until the latest end of the previous window's training, which ends earlier if it has few batches."""
        await self._clock.wait_for_window(window - 1)
        while self._clock.window < window:
            left = self._clock.seconds_left() - self._hparams.commit_margin_seconds
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def _apply_when_over(self, window: int, published: asyncio.Task[None] | None) -> None:
        """Apply a window once its updates are decided."""
        if published:
            await published  # must end before this node learns whether its update is in the set
        await self._clock.wait_for_window(window + 1)
        await self._replica.advance(until=window + 1)

    async def _make_update(self, window: int, after: asyncio.Task[None] | None = None) -> bytes | None:
        """Load a window's pages, train, and return the packed update; None if the window is missed.

        Args:
            after: publishes the previous update or restores it to the error feedback; awaited before packing.
        """
        with in_window(window):
            try:
                return await self._work(window, after)
            except (ChainUnavailable, DataError, StoreError, TrainingError) as error:
                self._miss(window, str(error), _cause(error))
                return None

    async def _work(self, window: int, after: asyncio.Task[None] | None) -> bytes | None:
        """As ``_make_update``, but raises errors."""
        uid = self._comms.uid
        with self._times.phase("waiting_for_pages"):
            pages = await self._data_loader.assigned(uid, window)
        ahead = asyncio.create_task(self._read_ahead(window + 1))
        try:
            await failpoint("data_loaded")
            if self._train_state.local.moves and not self._replica.beside_training:
                with self._times.phase("saving"):
                    await self._replica.wait_for_save()
            train_stats = await self._train(window, pages)
        finally:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
        await failpoint("trained")
        if train_stats.batches == 0:
            self._miss(window, _why_no_batch(pages, train_stats), "no_batch")
            return None
        if after:
            with self._times.phase("uploading"):
                await after
        async with AsyncExitStack() as holding:
            with self._times.phase("saving"):
                await holding.enter_async_context(self._replica.model_to_change())
            with self._times.phase("packing"):
                body = await asyncio.to_thread(
                    self._train_state.pack,
                    window=window,
                    uid=uid,
                    pages_digest=pages.digest,
                    batches=train_stats.batches,
                )
        await failpoint("packed")
        return body

    async def _read_ahead(self, window: int) -> None:
        """Load a window's pages as soon as they are known, at the start of the previous window."""
        await self._clock.wait_for_window(window - 1)
        self._data_loader.read_ahead(self._comms.uid, window)

    async def _put_out(self, window: int, body: bytes) -> None:
        """Publish an update; if it does not count, restore it to the error feedback."""
        with in_window(window):
            cause: Cause = "late"
            try:
                with self._replica.times.phase("uploading"):
                    missed = await self._publish(window, body)
            except ChainUnavailable as error:
                self._miss(window, str(error), _cause(error))
                return
            except StoreError as error:
                missed, cause = str(error), _cause(error)
            if missed:
                async with self._replica.model_to_change():
                    await asyncio.to_thread(self._train_state.restore_update, body, window=window, uid=self._comms.uid)
                self._miss(window, missed, cause)

    async def _train(self, window: int, pages: WindowBatches) -> TrainStats:
        """Train, and release the model between two inner steps whenever another task waits for it."""
        seconds, wanted = 0.0, self._replica.model.wanted
        self._training = window
        run = partial(self._train_state.train, pages.batches, window, pause=wanted)
        if self._profile:
            run = partial(self._profile.run, run, window)
        try:
            while True:
                async with AsyncExitStack() as holding:
                    with self._times.phase("applying"):
                        await holding.enter_async_context(self._replica.model)
                    began = time.monotonic()
                    with self._times.phase("training"):
                        train_stats = await asyncio.to_thread(run, stop=self._out_of_time)
                    seconds += time.monotonic() - began
                if not train_stats.paused:
                    break
                run = partial(self._train_state.continue_training, pause=wanted)
        finally:
            self._training = None  # a thread can't be cancelled: this makes it end after its current batch
        self._tokens = train_stats.tokens
        self._telemetry.emit(
            "trained",
            window=window,
            loss=train_stats.loss if train_stats.batches else None,
            batches=train_stats.batches,
            of_batches=len(pages.batches),
            skipped=train_stats.skipped,
            tokens=train_stats.tokens,
            seconds=seconds,
        )
        return train_stats

    def _out_of_time(self) -> bool:
        """Return whether training must end, so that the update is packed and its hash published in time."""
        if self._training is None or self._clock.window > self._training:
            return True
        in_time = self._clock.seconds_left() >= self._hparams.commit_margin_seconds
        return self._clock.window == self._training and not in_time

    async def _publish(self, window: int, body: bytes) -> str | None:
        """Publish the hash and then the update, each in its time bounds.

        Returns:
            The reason why the update does not count, or None if it does.

        Raises:
            StoreError: the bucket refused the hash or the update.
        """
        commit = await self._comms.put_commit(window, hashlib.sha256(body).hexdigest())
        await failpoint("committed")
        if self._clock.window > window:
            return "the update was not ready before the window's end"
        with self._replica.times.phase("waiting_for_end"):
            await self._clock.wait_for_window(window + 1)
            # A commit written in the second in which the window ends still counts, so publish after that second.
            await asyncio.sleep(UploadBounds.resolution)
        info = await self._comms.put_update(window, body)
        await failpoint("uploaded")
        parameters = sum(parameter.numel() for parameter in self._train_state.parameters.values())
        self._telemetry.emit("uploaded", window=window, bytes=len(body), parameters=parameters)
        try:
            bounds = await self._comms.upload_bounds(window, self._hparams.time_window_delta_seconds)
        except ChainUnavailable as error:
            logger.warning("uploaded; deadline check unavailable: %s", error)
            return None
        if self._hparams.require_commit and (late := commit.last_modified - bounds.start) > 0:
            return f"the hash was published {late:.0f} s after the window's end"
        while (verdict := bounds.judge(info.last_modified)) is Reason.TOO_EARLY:
            # The store's clock is behind the chain's. After the bound, other nodes no longer look for the update.
            behind = bounds.start - info.last_modified
            left = self._hparams.time_window_delta_seconds - self._clock.seconds_since(window + 1)
            if behind > left:
                return f"the bucket's clock is {behind:.0f} s behind the chain's, and the bound ends in {left:.0f} s"
            await asyncio.sleep(behind)
            info = await self._comms.put_update(window, body)
        return f"uploaded {info.last_modified - bounds.end:.0f} s after the deadline" if verdict else None

    def _report_times(self, window: int) -> None:
        """Emit the time spent in each phase since the last report."""
        seconds = self._times.take()
        rate = self._tokens / seconds["training"] if self._tokens else None
        self._telemetry.emit(
            "window_time",
            window=window,
            seconds=sum(seconds.values()),
            **seconds,
            tokens_per_second=rate,
            model_flops_utilisation=self._speed.utilisation(rate) if self._speed and rate else None,
            memory=self._train_state.memory_by_kind(),
        )
        self._tokens = 0

    def _miss(self, window: int, reason: str, cause: Cause) -> None:
        """Log and emit that a window was missed; ``cause`` is for statistics, ``reason`` for people."""
        logger.warning("window %d missed: %s", window, reason)
        self._telemetry.emit("missed", window=window, cause=cause, reason=reason)


def _cause(error: ChainUnavailable | DataError | StoreError | TrainingError) -> Cause:
    match error:
        case ChainUnavailable():
            return "chain"
        case DataError():
            return "data"
        case StoreError():
            return "storage"
        case TrainingError():
            return "training"


def _why_no_batch(pages: WindowBatches, train_stats: TrainStats) -> str:
    if not len(pages.batches):
        return "its pages contain less text than one batch: raise pages_per_window or lower batch_size"
    if train_stats.skipped:
        return "no batch had a finite loss and gradient"
    return "no batch was finished before the window's end"
