"""An aggregator: after a window's deadline, publishes its included set and the updates in one object."""

import asyncio
import hashlib
import time
from collections import Counter
from pathlib import Path

from tplr.compress.layout import PayloadSpec
from tplr.errors import ChainUnavailable, PayloadError, PreconditionFailed, StateError, StoreError, WindowLost
from tplr.exchange.aggregates import IncludedSet, bundle, included_set, split
from tplr.files import atomic_write
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.failpoints import failpoint
from tplr.node.leader import start_window
from tplr.node.replica import NodeContext
from tplr.node.windows import WindowUpdates


class Aggregator:
    """Publishes the peers' own bytes; has no model.

    A set is written once, after its updates are on this node's disk. From then on the window stays available, even if
    the peers' buckets are emptied or this process dies. Windows that were not published in time are published later,
    one with each new window. Their set is what the leading validator reported, so that no node has to roll back.
    """

    def __init__(
        self, context: NodeContext, hparams: HParams, spec: PayloadSpec, folder: Path, *, in_validator: bool = False
    ) -> None:
        """``folder`` keeps unpublished updates; ``in_validator``: publish only while this node leads."""
        self._context = context
        self._comms = context.comms
        self._hparams = hparams
        self._windows = WindowUpdates(context.comms, hparams, spec)
        self._folder = folder
        self._in_validator = in_validator
        self._done: set[int] = set()
        self._tries: Counter[int] = Counter()

    async def run(self) -> None:
        """Run until cancelled."""
        start = await start_window(self._context, self._hparams.start_horizon_windows)
        async for tick in self._context.clock.ticks():
            if self._comms.leads or not self._in_validator:
                for window in self._due(start, newest=tick.window - 1):
                    with in_window(window):
                        await self._aggregate(window, late=window < tick.window - 1)
            await self._comms.cleanup_aggregates(tick.window)

    def _due(self, start: int, newest: int) -> list[int]:
        """The newest window, and one unpublished earlier window: the one with the fewest tries, of these the newest."""
        oldest = max(start, newest - self._hparams.gradient_retention_windows + 1)
        self._done = {window for window in self._done if window >= oldest}
        gaps = [window for window in range(newest - 1, oldest - 1, -1) if window not in self._done]
        return [newest, *sorted(gaps, key=lambda window: self._tries[window])[:1]] if newest >= start else []

    async def _aggregate(self, window: int, *, late: bool) -> None:
        """Publish a window's set and updates, as far as they are missing. A failure is retried later."""
        began = time.monotonic()
        self._tries[window] += 1
        try:
            included = await self._comms.get_included(window)
            if included is None:
                included, body = await self._decide(window, late=late)
                await self._comms.put_included(included)
                await failpoint("included")
            elif await self._comms.get_aggregate(included) is not None:
                await self._finish(window)
                return
            else:
                body = await self._body_of(included)
            await self._comms.put_aggregate(included, body)
            await failpoint("aggregated")
        except PreconditionFailed:
            logger.info("another aggregator published this window first")
            return
        except (ChainUnavailable, PayloadError, StateError, StoreError, WindowLost) as error:
            logger.warning("not aggregated yet: %s", error)
            self._context.telemetry.emit("problem", text=f"window {window} not aggregated yet: {error}")
            return
        self._announce(included, time.monotonic() - began)
        await self._finish(window)

    async def _decide(self, window: int, *, late: bool) -> tuple[IncludedSet, bytes]:
        """Choose a set, and store its updates on disk. Raises as ``WindowUpdates.from_set``, and PayloadError."""
        reported = await self._windows.reported(window) if late else None
        found = await self._windows.from_set(reported) if reported else None
        if found is None:
            found = await self._windows.from_peers(window)
        await failpoint("found")
        included = included_set(found, self._hparams.version)
        body = bundle(included, [one.update.body for one in found.updates])
        await asyncio.to_thread(atomic_write, self._bundle_path(included), body)
        await failpoint("kept")
        return included, body

    async def _body_of(self, included: IncludedSet) -> bytes:
        """The aggregate of a published set. Raises as ``WindowUpdates.from_set``, and PayloadError."""
        path = self._bundle_path(included)
        if await asyncio.to_thread(path.exists):
            body = await asyncio.to_thread(path.read_bytes)
            try:
                await asyncio.to_thread(split, str(path), body, included)
            except PayloadError as error:
                logger.warning("stored aggregate of window %d not used: %s", included.window, error)
            else:
                return body
        found = await self._windows.from_set(included)
        if found is None:
            raise PayloadError("its set names an object that is not an update: no node can apply it")
        return bundle(included, [one.update.body for one in found.updates])

    def _bundle_path(self, included: IncludedSet) -> Path:
        digest = hashlib.sha256(included.model_dump_json().encode()).hexdigest()
        return self._folder / f"window-{included.window}-{digest[:16]}"

    async def _finish(self, window: int) -> None:
        self._done.add(window)
        del self._tries[window]
        for path in await asyncio.to_thread(lambda: [*self._folder.glob(f"window-{window}-*")]):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    def _announce(self, included: IncludedSet, seconds: float) -> None:
        uids = [one.uid for one in included.included]
        size = sum(one.size for one in included.included)
        logger.info("included set published: uids %s, %.2f MB; skipped %s", uids, size / 1e6, included.skipped)
        self._context.telemetry.emit(
            "aggregated",
            window=included.window,
            included=uids,
            skipped=included.skipped,
            bytes=size,
            success_rate=included.success_rate,
            seconds=seconds,
        )
