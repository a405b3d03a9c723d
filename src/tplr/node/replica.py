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
from tplr.data.prefetch import Prefetch
from tplr.errors import StateError, StoreError, WindowLost
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.agreement import Agreement
from tplr.node.holdings import Holdings, Part, leaders_report
from tplr.node.windows import WindowUpdates
from tplr.schemas import DebugReport, Reason
from tplr.seeds import fingerprint_seed, proof_seed
from tplr.telemetry import Telemetry
from tplr.training.fingerprint import digest, fingerprint

AHEAD = 2  # windows fetched while one is applied
CATCH_UP_SAVES = 10  # windows between two generations while many are made up for
SAY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Borders:
    """What a node speaks with: the others, the clock, and whoever listens."""

    comms: Comms
    clock: WindowClock
    telemetry: Telemetry


class Replica:
    """A model that holds all windows before ``window``.

    ``advance`` is the only way forward, whether the window ended just now or while this node was away. What is saved
    and published in the background ends with the ``async with`` block.
    """

    def __init__(
        self, model: LlamaForCausalLM, hparams: HParams, borders: Borders, folder: Path, *, every_peer: bool = False
    ) -> None:
        """``every_peer`` gathers from all buckets on chain instead of from the peer list."""
        self.model = model
        self.window = -1
        self._holdings = Holdings(model, hparams, folder)
        self.parameters = self._holdings.parameters
        self.outer = self._holdings.outer
        self.local = self._holdings.local
        self._hparams = hparams
        self._borders = borders
        self._windows = WindowUpdates(borders.comms, hparams, self.outer.spec, every_peer=every_peer)
        self._agreement = Agreement(borders.comms, self._windows)
        self._ahead: Prefetch[int, GatherResult[Update]] = Prefetch(self._windows.of, size=AHEAD)
        self._saving: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._ahead.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._publishing:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
        await self.settle()
        await self._ahead.__aexit__(kind, error, trace)

    @property
    def start_window(self) -> int:
        """First window of the run."""
        return self._holdings.start_window

    @property
    def step(self) -> int:
        """Outer steps applied: the position of every schedule."""
        return self.window - self.start_window

    def keep(self, name: str, part: Part) -> None:
        """Save ``part`` with the model, and restore it in ``open``."""
        self._holdings.parts[name] = part

    # Where a node goes on

    async def open(self, start_window: int) -> None:
        """Go on from this node's saved state, unless a checkpoint is more than ``checkpoint_frequency`` windows newer;
        without either, from the run's first weights."""
        self.window = self._holdings.start_window = start_window
        saved = await asyncio.to_thread(self._holdings.saved)
        newer_than = start_window if saved is None else saved.window + self._hparams.checkpoint_frequency
        if await self._take_checkpoint(newer_than=newer_than):
            return
        if saved is not None:
            await asyncio.to_thread(self._holdings.restore, saved)
            self.window = saved.window
            logger.info("going on from saved state: next window to apply is %d", self.window)
        elif version := self._hparams.checkpoint_init_version:
            await self._take_first_weights(version)

    async def _take_checkpoint(self, *, newer_than: int) -> bool:
        """Take over the newest checkpoint if it is of a window above ``newer_than``, and proves to be the network's."""
        comms = self._borders.comms
        try:
            checkpoint = await comms.get_latest_checkpoint()
        except StoreError as error:
            logger.warning("checkpoints not listed: %s", error)
            return False
        if checkpoint is None or checkpoint.window <= newer_than:
            return False
        await self.settle()
        window = await self._holdings.fetch(comms, checkpoint)
        if window is None:
            return False
        report = await leaders_report(comms, window - 1)
        if report is not None:
            seed = fingerprint_seed(window=window - 1, block_hash=await comms.window_hash(window))
            if report.fingerprint != self._fingerprint(seed):
                logger.error(
                    "the checkpoint of window %d by uid %d is not the model that the leading validator reports",
                    window,
                    checkpoint.uid,
                )
                await asyncio.to_thread(self._holdings.begin_anew)
                return False
        self.window = window
        return True

    async def _take_first_weights(self, version: str) -> None:
        checkpoint = await self._borders.comms.get_latest_checkpoint(version)
        if checkpoint is None:
            raise StateError(f"checkpoint_init_version {version}: no checkpoint of that version is published")
        await self._holdings.fetch_first_weights(self._borders.comms, checkpoint)
        logger.info("the run begins with the weights of version %s, window %d", version, checkpoint.window)

    # Forward

    async def advance(self, until: int) -> None:
        """Apply every window before ``until``; first go back to where this node left the network's way, if it did."""
        began, first, said = time.monotonic(), self.window, time.monotonic()
        while True:
            if (astray := await self._agreement.first_astray()) is not None:
                await self._return_to(astray)
            if self.window >= until:
                return
            for ahead in range(self.window + 1, min(until, self.window + 1 + AHEAD)):
                self._ahead.start(ahead)
            with in_window(self.window):
                try:
                    gathered = await self.gather()
                except WindowLost as lost:
                    await self._jump(lost)
                    continue
                whole = self.window + 1 >= until or self.window % CATCH_UP_SAVES == 0
                await self.apply(gathered, save=whole)
            if time.monotonic() - said >= SAY_SECONDS and self.window < until:
                said = time.monotonic()
                left = (until - self.window) * (said - began) / max(1, self.window - first)
                logger.info("catching up: %d windows to go, about %.0f s", until - self.window, left)

    async def gather(self) -> GatherResult[Update]:
        """The next window's updates; after it, nobody reads the tensors any more. Raises WindowLost."""
        gathered = await self._ahead.take(self.window)
        await self.settle()
        return gathered

    async def apply(self, gathered: GatherResult[Update], *, save: bool = True) -> None:
        """One outer step with what was gathered for ``self.window``; then fingerprint, publish, and save meanwhile."""
        began = time.monotonic()
        window, uid = self.window, self._borders.comms.uid
        unavailable = [uid for uid, reason in gathered.skipped.items() if reason is Reason.UNAVAILABLE]
        if unavailable and not gathered.published:
            logger.warning("going on without uids %s, which others may have reached", unavailable)
        # Asked for before the step: from there to the save nothing may fail.
        block_hash = await self._borders.comms.window_hash(window + 1)
        await self.settle()
        await asyncio.to_thread(self.outer.apply, [one.update for one in gathered.updates], step=self.step)
        if any(one.uid == uid for one in gathered.updates):
            self.outer.own_applied(self.step)
        report = await asyncio.to_thread(self._report, gathered, uid, block_hash)
        self.window = window + 1
        self._agreement.note(gathered, report.fingerprint)
        if save:
            self._saving = asyncio.create_task(self._save(self.window, self._holdings.part_values()))
        self._borders.telemetry.emit(
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
            await self._borders.comms.put_report(report)
        except StoreError as error:
            logger.warning("report of this window not published: %s", error)

    async def settle(self) -> None:
        """Wait until the tensors may change: what is saved in the background is written."""
        if self._saving:
            await asyncio.shield(self._saving)

    # Back, and over a gap

    async def _return_to(self, window: int) -> None:
        """Hold again what this node held before ``window``, or what a later checkpoint holds."""
        await self.settle()
        self._borders.telemetry.emit("problem", text=f"left the network's way in window {window}: going back")
        saved = await asyncio.to_thread(self._holdings.saved, at_most=window)
        if saved is not None:
            await asyncio.to_thread(self._holdings.restore_shared, saved)
            await asyncio.to_thread(self._holdings.forget_after, saved.window)
            self.window = saved.window
            logger.warning("back at window %d", saved.window)
        else:
            await self._jump(WindowLost(f"no saved state from before window {window}"), newer_than=self.start_window)

    async def _jump(self, reason: WindowLost, *, newer_than: int | None = None) -> None:
        """Go on from a checkpoint, however long it takes until there is one."""
        newer_than = self.window if newer_than is None else newer_than
        while not await self._take_checkpoint(newer_than=newer_than):
            logger.error("%s: waiting for a later checkpoint", reason)
            await asyncio.sleep(self._hparams.blocks_per_window * self._borders.clock.block_time)

    # What others and this node's next life need

    def _report(self, gathered: GatherResult[Update], uid: int, block_hash: str) -> DebugReport:
        own = proof_seed(uid=uid, window=gathered.window, block_hash=block_hash)
        whole = (self.step + 1) % self._hparams.digest_interval_windows == 0
        return DebugReport(
            window=gathered.window,
            uid=uid,
            fingerprint=self._fingerprint(fingerprint_seed(window=gathered.window, block_hash=block_hash)),
            proof=self._fingerprint(own),
            digest=digest(self.parameters) if whole else "",
            included={str(one.uid): one.sha256 for one in gathered.updates},
            skipped={str(uid): reason.value for uid, reason in gathered.skipped.items()},
        )

    def _fingerprint(self, seed: int) -> str:
        return fingerprint(self.parameters, seed=seed, samples=self._hparams.fingerprint_samples)

    async def _save(self, window: int, parts: dict[str, Any]) -> None:
        try:
            saved = await asyncio.to_thread(self._holdings.save, window, parts)
        except StateError as error:
            # The network's step is done all the same; what is lost is only the way back after a crash.
            logger.error("state not saved: %s", error)
            self._borders.telemetry.emit("problem", text=f"state not saved: {error}")
            return
        due = (window - self.start_window) % self._hparams.checkpoint_frequency == 0
        if due and (self._publishing is None or self._publishing.done()):
            self._holdings.hold(window, held=True)
            self._publishing = asyncio.create_task(self._publish(window, saved.folder))

    async def _publish(self, window: int, folder: Path) -> None:
        try:
            manifest = await self._borders.comms.save_checkpoint(folder)
            size = sum(shard.size for shard in manifest.shards)
            logger.info("checkpoint of window %d published, %.1f MB", window, size / 1e6)
            self._borders.telemetry.emit("checkpoint", window=window, bytes=size)
        except (StoreError, StateError) as error:
            logger.warning("checkpoint of window %d not published: %s", window, error)
        finally:
            self._holdings.hold(window, held=False)
