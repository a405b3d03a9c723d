"""An aggregator: right after a window's time bound, say which updates it consists of, and publish these together."""

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
    """Holds no model: what it publishes are the peers' own bytes.

    A set is written once, and only when its updates lie on this node's disk: from then on the window can be had,
    whatever becomes of the peers' buckets and of this process. What was not published in time (this node was away)
    follows, one window with each new one; such a set is what the leading validator says it applied, so that nobody has
    to go back.
    """

    def __init__(
        self, context: NodeContext, hparams: HParams, spec: PayloadSpec, folder: Path, *, in_validator: bool = False
    ) -> None:
        """``folder`` keeps what is not published yet; ``in_validator``: work only in windows in which it leads."""
        self._context = context
        self._comms = context.comms
        self._hparams = hparams
        self._windows = WindowUpdates(context.comms, hparams, spec)
        self._folder = folder
        self._in_validator = in_validator
        self._done: set[int] = set()
        self._tries: Counter[int] = Counter()

    async def run(self) -> None:
        """Work until cancelled."""
        start = await start_window(self._context)
        async for tick in self._context.clock.ticks():
            if self._comms.leads or not self._in_validator:
                for window in self._due(start, newest=tick.window - 1):
                    with in_window(window):
                        await self._aggregate(window, late=window < tick.window - 1)
            await self._comms.cleanup_aggregates(tick.window)

    def _due(self, start: int, newest: int) -> list[int]:
        """The newest window, and of those still to be done the one that was tried least, and of these the newest."""
        oldest = max(start, newest - self._hparams.gradient_retention_windows + 1)
        self._done = {window for window in self._done if window >= oldest}
        gaps = [window for window in range(newest - 1, oldest - 1, -1) if window not in self._done]
        return [newest, *sorted(gaps, key=lambda window: self._tries[window])[:1]] if newest >= start else []

    async def _aggregate(self, window: int, *, late: bool) -> None:
        """Publish a window's set and updates, or what of them is missing. What fails now is tried again later."""
        began = time.monotonic()
        self._tries[window] += 1
        try:
            included = await self._comms.get_included(window)
            if included is None:
                included, body = await self._settle(window, late=late)
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
            logger.info("another aggregator was first")
            return
        except (ChainUnavailable, PayloadError, StateError, StoreError, WindowLost) as error:
            logger.warning("not aggregated yet: %s", error)
            self._context.telemetry.emit("problem", text=f"window {window} not aggregated yet: {error}")
            return
        self._tell(included, time.monotonic() - began)
        await self._finish(window)

    async def _settle(self, window: int, *, late: bool) -> tuple[IncludedSet, bytes]:
        """Decide on a set, and keep its updates. Raises as ``WindowUpdates.exactly``, and PayloadError."""
        reported = await self._windows.reported(window) if late else None
        found = await self._windows.exactly(reported) if reported else None
        if found is None:
            found = await self._windows.own_finding(window)
        await failpoint("found")
        included = included_set(found, self._hparams.version)
        body = bundle(included, [one.update.body for one in found.updates])
        await asyncio.to_thread(atomic_write, self._kept(included), body)
        await failpoint("kept")
        return included, body

    async def _body_of(self, included: IncludedSet) -> bytes:
        """The aggregate of a set that is published already. Raises as ``WindowUpdates.exactly``, and PayloadError."""
        path = self._kept(included)
        if await asyncio.to_thread(path.exists):
            body = await asyncio.to_thread(path.read_bytes)
            try:
                await asyncio.to_thread(split, str(path), body, included)
            except PayloadError as error:
                logger.warning("what was kept of window %d is not used: %s", included.window, error)
            else:
                return body
        found = await self._windows.exactly(included)
        if found is None:
            raise PayloadError("what its set names is no update: nobody can follow it")
        return bundle(included, [one.update.body for one in found.updates])

    def _kept(self, included: IncludedSet) -> Path:
        digest = hashlib.sha256(included.model_dump_json().encode()).hexdigest()
        return self._folder / f"window-{included.window}-{digest[:16]}"

    async def _finish(self, window: int) -> None:
        self._done.add(window)
        del self._tries[window]
        for path in await asyncio.to_thread(lambda: [*self._folder.glob(f"window-{window}-*")]):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    def _tell(self, included: IncludedSet, seconds: float) -> None:
        uids = [one.uid for one in included.included]
        size = sum(one.size for one in included.included)
        logger.info("window %d is %s, %.2f MB; skipped %s", included.window, uids, size / 1e6, included.skipped)
        self._context.telemetry.emit(
            "aggregated",
            window=included.window,
            included=uids,
            skipped=included.skipped,
            bytes=size,
            success_rate=included.success_rate,
            seconds=seconds,
        )
