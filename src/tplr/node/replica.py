"""A node's model and how it advances: gather, apply, fingerprint, save; equal for live and past windows."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tplr.clock import WindowClock
from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.concurrency.prefetch import Prefetch
from tplr.errors import ChainUnavailable, FalseModel, StateError, StoreError, WindowLost
from tplr.exchange.checkpoints import Checkpoint, Copies, alike, manifest_cap
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.agreement import Agreement, Divergence
from tplr.node.failpoints import failpoint
from tplr.node.fetched_state import fetch_first_weights, fetched_state, shared_layout, shared_part
from tplr.node.model_lock import ModelLock
from tplr.node.state import SavedState
from tplr.node.train_state import PARTS, Stateful, TrainState, saved_fingerprints
from tplr.node.window_time import WindowTime
from tplr.node.windows import WindowUpdates, majority_report
from tplr.schemas import DebugReport, Reason
from tplr.seeds import fingerprint_seed
from tplr.telemetry import Telemetry
from tplr.training.commands import Commands
from tplr.training.device import DEFAULTS, DeviceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")

PREFETCH_WINDOWS = 2  # windows that are fetched while one is applied
CATCH_UP_SAVES = 10  # windows between two snapshots during catch-up
LOG_INTERVAL = 10.0  # seconds


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """A node's connections: to other nodes, to the clock, and to its event listeners."""

    comms: Comms
    clock: WindowClock
    telemetry: Telemetry


class Replica(AbstractAsyncContextManager["Replica", None]):
    """A model with all windows before ``window`` applied.

    ``advance`` applies windows, both live ones and those that ended while this node was away. The ``async with`` block
    waits for background saves and cancels background publishing.

    Attributes:
        window: the next window to apply.
        model: the lock that a task holds while it reads or changes the model; ``advance`` and ``open`` take it.
        beside_training: whether training, which also holds ``model``, continues while a state is saved.
        folder: of the saved state.
        times: the time that this node spends in each phase; the role adds its own phases.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        hparams: HParams,
        context: NodeContext,
        folder: Path,
        *,
        every_peer: bool = False,
        settings: DeviceSettings = DEFAULTS,
        commands: Commands | None = None,
    ) -> None:
        """Create a replica without a model state; ``open`` loads one.

        Args:
            every_peer: gather from all buckets on chain instead of from the peer list.
            commands: of the ranks that hold the model together; None in a single process.
        """
        self.window = -1
        self.model = ModelLock()
        self.beside_training = False
        self.folder = folder
        self.train_state = TrainState(model, hparams, folder, settings, commands)
        self._hparams = hparams
        self._context = context
        self._windows = WindowUpdates(context.comms, hparams, self.train_state.outer.spec, every_peer=every_peer)
        self._agreement = Agreement(context.comms, self._windows)
        self._prefetch: Prefetch[int, GatherResult[Update]] = Prefetch(self._windows.of, size=1 + PREFETCH_WINDOWS)
        self.register("agreement", self._agreement)
        self.times = WindowTime()
        self._saving: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._false: Counter[str] = Counter()  # false checkpoints that were downloaded, by the author's hotkey
        self._wrong_after: int | None = None  # own checkpoints of later windows are to be withdrawn

    async def __aexit__(self, *_: object) -> None:
        self.train_state.ending = True  # the threads of cancelled tasks end only by themselves
        await self._stop_saving()
        await self._prefetch.__aexit__()

    def register(self, name: str, stateful: Stateful) -> None:
        """Save ``stateful`` with the model, and restore it in ``open``."""
        self.train_state.stateful[name] = stateful

    # Resume

    async def open(self, start_window: int) -> None:
        """Resume from this node's saved state, or start from the run's first weights.

        A checkpoint replaces either if it is more than ``checkpoint_frequency`` windows newer than the saved state.
        """
        self.window = self.train_state.start_window = start_window
        saved = await asyncio.to_thread(self.train_state.saved)
        if saved is not None:
            await self._with_model(self.train_state.restore, saved)
            self.window = saved.window
            logger.info("saved state restored: next window to apply is %d", self.window)
        newer_than = start_window if saved is None else saved.window + self._hparams.checkpoint_frequency
        if not await self._take_checkpoint(newer_than=newer_than) and saved is None:
            await self._set_first_weights()

    async def _take_checkpoint(self, *, newer_than: int) -> bool:
        """Restore the first valid checkpoint of a window above ``newer_than``; return whether there was one.

        Of the others' checkpoints of one window, those come first that electors with the most stake publish alike.
        """
        comms = self._context.comms
        # A checkpoint of a future window would move this node ahead of the clock.
        found = [one for one in await comms.checkpoints() if newer_than < one.window <= self._context.clock.window]
        start, each = self.train_state.start_window, self._hparams.checkpoint_frequency
        # Last come those of electors that have published a false one; before them those of windows without a due one:
        # a single elector could choose a newer one than all others have.
        found.sort(key=lambda one: (self._false[one.author.hotkey] > 0, (one.window - start) % each > 0))
        tried: Counter[str] = Counter()
        done: list[Checkpoint] = []

        def may_try(one: Checkpoint) -> bool:
            # Each is a download of the whole model; an honest elector has no more, also while it publishes one.
            by = one.author.hotkey
            return max(tried[by], self._false[by]) <= self._hparams.checkpoints_kept and one not in done

        def kind(one: Checkpoint) -> tuple[bool, bool, int]:
            return self._false[one.author.hotkey] > 0, one.uid == comms.uid, one.window

        for first in found:
            if not may_try(first):
                continue
            same = [one for one in found if kind(one) == kind(first) and may_try(one)]
            used, cap = partial(shared_part, self.train_state), manifest_cap(shared_layout(self.train_state))
            for group in await alike(same, used, comms.electors, max_bytes=cap):
                done += group.checkpoints
                tried.update(one.author.hotkey for one in group.checkpoints)
                if await self._restore_one_of(group):
                    return True
        return False

    async def _restore_one_of(self, group: Copies) -> bool:
        """Restore a checkpoint that several electors publish, or one; return whether it is valid."""
        checkpoint, *mirrors = group.checkpoints
        try:
            report = await self._confirming(checkpoint)
            comms, manifest = self._context.comms, group.manifest
            async with fetched_state(self.train_state, comms, checkpoint, *mirrors, manifest=manifest) as fetched:
                if report:
                    await self._check_model(fetched, report)
                await self.wait_for_save()
                await self._with_model(self.train_state.restore_shared, fetched)
        except (ChainUnavailable, StateError, StoreError) as error:
            logger.warning("checkpoint of window %d by uid %d not used: %s", checkpoint.window, checkpoint.uid, error)
            if isinstance(error, FalseModel):
                self._false.update(one.author.hotkey for one in group.checkpoints)
            return False
        if checkpoint.window > self.window:
            # A skipped window may contain this node's last update: treat it as applied.
            await self._with_model(self.train_state.own_applied, checkpoint.window - 1)
        self.window = checkpoint.window
        self._agreement.forget()
        self._prefetch.clear()  # of windows that are skipped, whose updates may never be found
        logger.info("checkpoint of window %d by uid %d restored", checkpoint.window, checkpoint.uid)
        self._context.telemetry.emit("restored", window=checkpoint.window, peer=checkpoint.uid)
        return True

    async def _confirming(self, checkpoint: Checkpoint) -> DebugReport | None:
        """Return most electors' report with the digest of a checkpoint's model, before the model is downloaded.

        A fingerprint alone would not do: who publishes a checkpoint after that window knows which entries it hashes.
        None for a checkpoint of a sole elector or of this node without a report: later reports will show a difference.
        Raises StateError if there is no such report.
        """
        comms, by = self._context.comms, checkpoint.uid
        report = None if comms.alone else await majority_report(comms, checkpoint.window - 1, whole=True)
        if report is None and by != comms.uid and comms.electors.uids != (by,):
            raise StateError("most electors report no common model of that window")
        if report and not report.digest and by != comms.uid:
            raise StateError("most electors report no digest of the model of that window")
        return report

    async def _check_model(self, fetched: SavedState, report: DebugReport) -> None:
        """Raise FalseModel unless this is the model of the previous window's report."""
        window = fetched.window
        seed = fingerprint_seed(window=window - 1, block_hash=await self._context.comms.window_hash(window))
        samples, whole = self._hparams.fingerprint_samples, bool(report.digest)
        found = await asyncio.to_thread(saved_fingerprints, fetched, seed=seed, samples=samples, whole=whole)
        if (report.fingerprint, report.outer_fingerprint) != found[:2]:
            raise FalseModel("its fingerprints differ from those that most electors report")
        if report.digest != found[2]:
            raise FalseModel("its digest differs from the one that most electors report")

    async def _set_first_weights(self) -> None:
        """Set the run's first weights: random ones, or those of another version's checkpoint."""
        if not self._hparams.checkpoint_init_version:
            await self._with_model(self.train_state.reset_to_first_weights)
            return
        async with self.model:
            await fetch_first_weights(self.train_state, self._context.comms, self._hparams)

    # Forward

    async def advance(self, until: int) -> None:
        """Apply every window before ``until``; first roll back if this node diverged from the network."""
        began, first, logged = time.monotonic(), self.window, time.monotonic()
        while True:
            if (divergence := await self._agreement.first_divergence()) is not None:
                await self._roll_back_from(divergence)
            if self.window >= until:
                return
            for ahead in range(self.window + 1, min(until, self.window + 1 + PREFETCH_WINDOWS)):
                self._prefetch.start(ahead)
            with in_window(self.window):
                try:
                    gathered = await self.gather()
                except WindowLost as lost:
                    await self._skip_to_checkpoint(lost)
                    continue
                whole = self.window + 1 >= until or self.window % CATCH_UP_SAVES == 0
                await self.apply(gathered, save=whole)
            if time.monotonic() - logged >= LOG_INTERVAL and self.window < until:
                logged = time.monotonic()
                left = (until - self.window) * (logged - began) / max(1, self.window - first)
                logger.info("catching up: %d windows left, about %.0f s", until - self.window, left)

    async def gather(self) -> GatherResult[Update]:
        """Return the next window's updates, after any save that reads the tensors has ended. Raises WindowLost."""
        clock, began = self._context.clock, time.monotonic()
        closes_in = self._hparams.time_window_delta_seconds - clock.seconds_since(self.window + 1)
        with self.times.phase("gathering"):
            gathered = await self._prefetch.take(self.window)
            self.times.move("gathering", "waiting_for_bound", min(closes_in, time.monotonic() - began))
        await failpoint("gathered")
        await self.wait_for_save()
        return gathered

    async def apply(self, gathered: GatherResult[Update], *, save: bool = True) -> None:
        """Take the outer step of ``self.window``, then publish its report while the state is saved."""
        with self.times.phase("applying"):
            began = time.monotonic()
            window, uid = self.window, self._context.comms.uid
            unavailable = [uid for uid, reason in gathered.skipped.items() if reason is Reason.UNAVAILABLE]
            if unavailable and not gathered.published:
                logger.warning("applying without unreachable uids %s; other nodes may have reached them", unavailable)
            # The hash was cached when the window was gathered: nothing between here and the save may fail.
            block_hash = await self._context.comms.window_hash(window + 1)
            async with self.model_to_change():
                await asyncio.to_thread(self.train_state.apply, [one.update for one in gathered.updates], window)
                if any(one.uid == uid for one in gathered.updates):
                    await asyncio.to_thread(self.train_state.own_applied, window)
                await failpoint("applied")
                report = await asyncio.to_thread(self.train_state.report, gathered, uid=uid, block_hash=block_hash)
                self.window = window + 1
                self._agreement.note(gathered, report)
                if save:
                    await self._start_save()
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
                logger.warning("report not published: %s", error)
            await failpoint("reported")

    async def wait_for_save(self) -> None:
        """Wait until the background save is written; afterwards tensors may change."""
        if self._saving:
            with self.times.phase("saving"):
                await asyncio.shield(self._saving)

    @asynccontextmanager
    async def model_to_change(self) -> AsyncIterator[None]:
        """Hold the model while no save reads the tensors; one may begin while this waits for the model."""
        while True:
            await self.wait_for_save()  # it needs the model for its end, so not while this holds it
            async with self.model:
                if self._saving is None or self._saving.done():
                    yield
                    return

    # Roll back, and skip windows

    async def _roll_back_from(self, divergence: Divergence) -> None:
        """Return to this node's last saved state before the divergence, or to a checkpoint."""
        self._context.telemetry.emit("rolled_back", window=divergence.window)
        await self._stop_saving()
        saved = await asyncio.to_thread(self.train_state.saved, until=divergence.window)
        before = self.train_state.start_window if saved is None else saved.window
        self._wrong_after = before if self._wrong_after is None else min(before, self._wrong_after)
        # First in the bucket: after a kill, the states on disk show the divergence again.
        try:
            await self._withdraw_wrong()
        except StoreError as error:
            logger.warning("own checkpoints after window %d not withdrawn: %s", self._wrong_after, error)
        await asyncio.to_thread(self.train_state.snapshots.forget_after, divergence.window)
        if divergence.local_state_failed and await self._take_checkpoint(newer_than=self.train_state.start_window):
            return
        if saved is not None:
            await self._with_model(self.train_state.restore_shared, saved)
            self.window = saved.window
            logger.warning("rolled back to window %d", saved.window)
            return
        if not await self._take_checkpoint(newer_than=self.train_state.start_window):
            await self._restart_from_first_weights()

    async def _restart_from_first_weights(self) -> None:
        logger.warning("no earlier state and no checkpoint: rolled back to the run's first weights")
        self.window = self.train_state.start_window
        await self._set_first_weights()

    async def _skip_to_checkpoint(self, reason: WindowLost) -> None:
        """Continue from a later checkpoint; without one, log it and wait for the length of a window."""
        if await self._take_checkpoint(newer_than=self.window):
            logger.warning("%s: skipped to the checkpoint of window %d", reason, self.window)
            self._context.telemetry.emit("problem", text=f"{reason}: skipped to the checkpoint of window {self.window}")
            return
        logger.error("%s: waiting for a later checkpoint", reason)
        self._context.telemetry.emit("problem", text=f"{reason}: waiting for a later checkpoint")
        await asyncio.sleep(self._hparams.blocks_per_window * self._context.clock.block_time)

    async def _stop_saving(self) -> None:
        """Wait until the background save is written, and cancel the publishing that its end may have begun."""
        await self.wait_for_save()
        if self._publishing:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])

    async def _withdraw_wrong(self) -> None:
        """Delete this node's checkpoints of a model that it has rolled back. Raises StoreError."""
        if self._wrong_after is not None:
            await self._context.comms.withdraw_checkpoints(self._wrong_after)
            self._wrong_after = None

    # Save and publish

    async def _start_save(self) -> None:
        """Save the state as it is now, in the background; the caller holds the model."""
        window, stateful = self.window, self.train_state.stateful_values()
        if not self.beside_training:
            saved = asyncio.to_thread(self.train_state.save, window, stateful)
        else:
            try:
                await asyncio.to_thread(self.train_state.begin_save, window, stateful)
            except StateError as error:
                self._not_saved(error)
                return
            saved = self._end_save()
        self._saving = asyncio.create_task(self._save(window, saved))

    async def _end_save(self) -> SavedState:
        """Finish the snapshot that ``begin_save`` began, and return it. Raises StateError."""
        await asyncio.to_thread(self.train_state.wait_written)
        return await self._with_model(self.train_state.end_save)

    async def _save(self, window: int, saving: Awaitable[SavedState]) -> None:
        """Wait until the state is saved; if a checkpoint is due and this node is an elector, publish it."""
        try:
            saved = await saving
        except StateError as error:
            self._not_saved(error)
            return
        await failpoint("saved")
        due = (window - self.train_state.start_window) % self._hparams.checkpoint_frequency == 0
        if not due or (self._publishing and not self._publishing.done()):
            return
        comms = self._context.comms
        uid = comms.metagraph.uid_of(comms.hotkey)
        if uid is None:
            return  # this node has just lost its uid on the subnet, and is about to end
        if uid in comms.electors:
            held = self.train_state.snapshots.held
            held.add(window)
            self._publishing = asyncio.create_task(self._publish(window, saved.folder))
            # Also if the task is cancelled before it begins.
            self._publishing.add_done_callback(lambda _: held.discard(window))
        elif comms.electors.uids:
            self._publishing = asyncio.create_task(self._withdraw_unread())

    def _not_saved(self, error: StateError) -> None:
        # The step has been taken; only the state to restart from after a crash is older.
        logger.error("state not saved: %s", error)
        self._context.telemetry.emit("problem", text=f"state not saved: {error}")

    async def _with_model(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work`` in a thread while this task holds the model."""
        async with self.model:
            return await asyncio.to_thread(work, *args, **kwargs)

    async def _publish(self, window: int, folder: Path) -> None:
        await failpoint("publishing")
        try:
            await self._withdraw_wrong()  # a checkpoint that is there is not replaced
            manifest = await self._context.comms.publish_checkpoint(folder, without=[PARTS])
            await failpoint("published")
            size = sum(shard.size for shard in manifest.shards)
            logger.info("checkpoint of window %d published, %.1f MB", window, size / 1e6)
            self._context.telemetry.emit("checkpoint", window=window, bytes=size)
        except (StoreError, StateError) as error:
            logger.warning("checkpoint of window %d not published: %s", window, error)

    async def _withdraw_unread(self) -> None:
        """Delete this node's published checkpoints: no node reads those of a node that is not an elector."""
        try:
            await self._context.comms.withdraw_checkpoints(-1)
        except StoreError as error:
            logger.warning("own checkpoints, which are no longer read, not deleted: %s", error)
