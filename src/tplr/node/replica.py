"""The model of a node and how it moves: gather a window, apply it, fingerprint, save. Live and replay alike."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from transformers import LlamaForCausalLM

from tplr.clock import WindowClock
from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.concurrency.prefetch import Prefetch
from tplr.errors import ChainUnavailable, StateError, StoreError, WindowLost
from tplr.exchange.checkpoints import Checkpoint
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.agreement import Agreement, Divergence
from tplr.node.failpoints import failpoint
from tplr.node.state import SavedState
from tplr.node.train_state import Part, TrainState
from tplr.node.windows import WindowUpdates, leaders_report
from tplr.schemas import Reason
from tplr.seeds import fingerprint_seed
from tplr.telemetry import Telemetry
from tplr.training.fingerprint import fingerprint

AHEAD = 2  # windows fetched while one is applied
CATCH_UP_SAVES = 10  # windows between two generations while many are made up for
LOG_INTERVAL = 10.0


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """What a node speaks with: the others, the clock, and whoever listens."""

    comms: Comms
    clock: WindowClock
    telemetry: Telemetry


class Replica:
    """A model that holds all windows before ``window``.

    ``advance`` is the only way forward, whether the window ended just now or while this node was away. What is saved
    and published in the background ends with the ``async with`` block.

    Attributes:
        window: the next one to apply.
        folder: of the saved state.
    """

    def __init__(
        self, model: LlamaForCausalLM, hparams: HParams, context: NodeContext, folder: Path, *, every_peer: bool = False
    ) -> None:
        """``every_peer`` gathers from all buckets on chain instead of from the peer list."""
        self.window = -1
        self.folder = folder
        self.train_state = TrainState(model, hparams, folder)
        self._hparams = hparams
        self._context = context
        self._windows = WindowUpdates(context.comms, hparams, self.train_state.outer.spec, every_peer=every_peer)
        self._agreement = Agreement(context.comms, self._windows)
        # The window to apply, and those after it.
        self._ahead: Prefetch[int, GatherResult[Update]] = Prefetch(self._windows.of, size=1 + AHEAD)
        self.keep("agreement", self._agreement)
        self._saving: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._ahead.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_publishing()
        await self.wait_for_save()
        await self._ahead.__aexit__(kind, error, trace)

    def keep(self, name: str, part: Part) -> None:
        """Save ``part`` with the model, and restore it in ``open``."""
        self.train_state.parts[name] = part

    # Where a node goes on

    async def open(self, start_window: int) -> None:
        """Go on from this node's saved state; without it from the run's first weights; in both cases from a checkpoint
        instead if one is more than ``checkpoint_frequency`` windows newer."""
        self.window = self.train_state.start_window = start_window
        saved = await asyncio.to_thread(self.train_state.saved)
        if saved is not None:
            await asyncio.to_thread(self.train_state.restore, saved)
            self.window = saved.window
            logger.info("saved state: next window to apply is %d", self.window)
        newer_than = start_window if saved is None else saved.window + self._hparams.checkpoint_frequency
        if await self._take_checkpoint(newer_than=newer_than):
            # Whether an update that was sent right before the end was applied in the windows leapt over, nobody knows.
            self.train_state.outer.own_applied(self.window - 1)
        elif saved is None and (version := self._hparams.checkpoint_init_version):
            await self._take_first_weights(version)

    async def _take_checkpoint(self, *, newer_than: int) -> bool:
        """Take over the first checkpoint of a window above ``newer_than`` that proves to be the network's."""
        for checkpoint in await self._context.comms.checkpoints():
            # One of a window to come would be taken for this node's own place in time.
            if not newer_than < checkpoint.window <= self._context.clock.window:
                continue
            try:
                async with self.train_state.fetched(self._context.comms, checkpoint) as fetched:
                    await self._check_leader(fetched)
                    await self.wait_for_save()
                    await asyncio.to_thread(self.train_state.restore_shared, fetched)
            except (ChainUnavailable, StateError, StoreError) as error:
                logger.warning(
                    "checkpoint of window %d by uid %d not used: %s", checkpoint.window, checkpoint.uid, error
                )
                continue
            self.window = checkpoint.window
            self._tell_taken(checkpoint)
            return True
        return False

    async def _check_leader(self, fetched: SavedState) -> None:
        """Raises StateError if the leading validator reports another model; nothing if it has not reported that window:
        then the windows to come will show it."""
        comms, window = self._context.comms, fetched.window
        report = None if comms.leads else await leaders_report(comms, window - 1)
        if report is None:
            return
        seed = fingerprint_seed(window=window - 1, block_hash=await comms.window_hash(window))
        samples = self._hparams.fingerprint_samples
        step = fetched.manifest.global_step
        found = await asyncio.to_thread(fingerprint, fetched.lazily("model"), step=step, seed=seed, samples=samples)
        if report.fingerprint != found:
            raise StateError("it is not the model that the leading validator reports of that window")

    def _tell_taken(self, checkpoint: Checkpoint) -> None:
        logger.info("took over the checkpoint of window %d by uid %d", checkpoint.window, checkpoint.uid)
        self._context.telemetry.emit("restored", window=checkpoint.window, peer=checkpoint.uid)

    async def _take_first_weights(self, version: str) -> None:
        checkpoint = await self._context.comms.get_latest_checkpoint(version)
        if checkpoint is None:
            raise StateError(f"checkpoint_init_version {version}: no checkpoint of that version is published")
        await self.train_state.fetch_first_weights(self._context.comms, checkpoint)
        logger.info("the run begins with the weights of version %s, window %d", version, checkpoint.window)

    # Forward

    async def advance(self, until: int) -> None:
        """Apply every window before ``until``; first go back to where this node left the network's way, if it did."""
        began, first, said = time.monotonic(), self.window, time.monotonic()
        while True:
            if (divergence := await self._agreement.first_astray()) is not None:
                await self._return_from(divergence)
            if self.window >= until:
                return
            for ahead in range(self.window + 1, min(until, self.window + 1 + AHEAD)):
                self._ahead.start(ahead)
            with in_window(self.window):
                try:
                    gathered = await self.gather()
                except WindowLost as lost:
                    await self._skip_to_checkpoint(lost)
                    continue
                whole = self.window + 1 >= until or self.window % CATCH_UP_SAVES == 0
                await self.apply(gathered, save=whole)
            if time.monotonic() - said >= LOG_INTERVAL and self.window < until:
                said = time.monotonic()
                left = (until - self.window) * (said - began) / max(1, self.window - first)
                logger.info("catching up: %d windows to go, about %.0f s", until - self.window, left)

    async def gather(self) -> GatherResult[Update]:
        """The next window's updates; after it, nobody reads the tensors any more. Raises WindowLost."""
        gathered = await self._ahead.take(self.window)
        await failpoint("gathered")
        await self.wait_for_save()
        return gathered

    async def apply(self, gathered: GatherResult[Update], *, save: bool = True) -> None:
        """One outer step with what was gathered for ``self.window``; then fingerprint, publish, and save meanwhile."""
        began = time.monotonic()
        window, uid = self.window, self._context.comms.uid
        unavailable = [uid for uid, reason in gathered.skipped.items() if reason is Reason.UNAVAILABLE]
        if unavailable and not gathered.published:
            logger.warning("going on without uids %s, which others may have reached", unavailable)
        # Known since the window was gathered: from here to the save nothing may fail.
        block_hash = await self._context.comms.window_hash(window + 1)
        await self.wait_for_save()
        await asyncio.to_thread(self.train_state.apply, [one.update for one in gathered.updates])
        if any(one.uid == uid for one in gathered.updates):
            self.train_state.outer.own_applied(window)
        await failpoint("applied")
        report = await asyncio.to_thread(self.train_state.report, gathered, uid=uid, block_hash=block_hash)
        self.window = window + 1
        self._agreement.note(gathered, report.fingerprint)
        if save:
            self._saving = asyncio.create_task(self._save(self.window, self.train_state.part_values()))
        self._context.telemetry.emit(
            "applied",
            window=window,
            included=[one.uid for one in gathered.updates],
            skipped={str(uid): reason.value for uid, reason in gathered.skipped.items()},
            bytes=gathered.bytes,
            fingerprint=report.fingerprint,
            digest=report.digest,
            seconds=time.monotonic() - began,
        )
        try:
            await self._context.comms.put_report(report)
        except StoreError as error:
            logger.warning("report of this window not published: %s", error)
        await failpoint("reported")

    async def wait_for_save(self) -> None:
        """Wait until the tensors may change: what is saved in the background is written."""
        if self._saving:
            await asyncio.shield(self._saving)

    # Back, and over a gap

    async def _return_from(self, divergence: Divergence) -> None:
        """Hold again what this node held before it left the network's way, or what a checkpoint holds."""
        self._context.telemetry.emit("rolled_back", window=divergence.window)
        await self._stop_publishing()
        await self.wait_for_save()
        await asyncio.to_thread(self.train_state.forget_after, divergence.window)
        saved = await asyncio.to_thread(self.train_state.saved)
        before = self.train_state.start_window if saved is None else saved.window
        try:
            await self._context.comms.withdraw_checkpoints(before)
        except StoreError as error:
            logger.warning("this node's checkpoints after window %d are not withdrawn: %s", before, error)
        if divergence.local_state_failed and await self._take_checkpoint(newer_than=self.train_state.start_window):
            return
        if saved is not None:
            await asyncio.to_thread(self.train_state.restore_shared, saved)
            self.window = saved.window
            logger.warning("back at window %d", saved.window)
            return
        if not await self._take_checkpoint(newer_than=self.train_state.start_window):
            await self._begin_anew()

    async def _begin_anew(self) -> None:
        logger.warning("neither a state from before nor a checkpoint: back at the run's first weights")
        await asyncio.to_thread(self.train_state.begin_anew)
        self.window = self.train_state.start_window
        if version := self._hparams.checkpoint_init_version:
            await self._take_first_weights(version)

    async def _skip_to_checkpoint(self, reason: WindowLost) -> None:
        """Go on from a later checkpoint; while there is none, let a window pass and say so."""
        if await self._take_checkpoint(newer_than=self.window):
            logger.warning("%s: going on from window %d", reason, self.window)
            self._context.telemetry.emit("problem", text=f"{reason}: went on from window {self.window}")
            return
        logger.error("%s: waiting for a later checkpoint", reason)
        self._context.telemetry.emit("problem", text=f"{reason}: waiting for a later checkpoint")
        await asyncio.sleep(self._hparams.blocks_per_window * self._context.clock.block_time)

    async def _stop_publishing(self) -> None:
        if self._publishing:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])

    # What others and this node's next life need

    async def _save(self, window: int, parts: dict[str, Any]) -> None:
        try:
            saved = await asyncio.to_thread(self.train_state.save, window, parts)
        except StateError as error:
            # The network's step is done all the same; what is lost is only the way back after a crash.
            logger.error("state not saved: %s", error)
            self._context.telemetry.emit("problem", text=f"state not saved: {error}")
            return
        await failpoint("saved")
        due = (window - self.train_state.start_window) % self._hparams.checkpoint_frequency == 0
        if due and (self._publishing is None or self._publishing.done()):
            self.train_state.hold(window, held=True)
            self._publishing = asyncio.create_task(self._publish(window, saved.folder))

    async def _publish(self, window: int, folder: Path) -> None:
        await failpoint("publishing")
        try:
            manifest = await self._context.comms.save_checkpoint(folder)
            await failpoint("published")
            size = sum(shard.size for shard in manifest.shards)
            logger.info("checkpoint of window %d published, %.1f MB", window, size / 1e6)
            self._context.telemetry.emit("checkpoint", window=window, bytes=size)
        except (StoreError, StateError) as error:
            logger.warning("checkpoint of window %d not published: %s", window, error)
        finally:
            self.train_state.hold(window, held=False)
