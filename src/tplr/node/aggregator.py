"""An aggregator: publishes the updates of each decided set in one object. It takes no part in decisions."""

import time
from pathlib import Path

from tplr.compress.layout import PayloadSpec
from tplr.errors import ChainUnavailable, PayloadError, StateError, StoreError, WindowLost
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.failpoints import failpoint
from tplr.node.leader import start_window
from tplr.node.own_aggregates import OwnAggregates, announce
from tplr.node.replica import NodeContext
from tplr.node.windows import WindowUpdates


class Aggregator:
    """Publishes the peers' own bytes; has no model.

    With each new window it also publishes one earlier window that was not published in time.
    """

    def __init__(self, context: NodeContext, hparams: HParams, spec: PayloadSpec, folder: Path) -> None:
        """``folder`` keeps unpublished updates."""
        self._context = context
        self._comms = context.comms
        self._hparams = hparams
        self._windows = WindowUpdates(context.comms, hparams, spec)
        self._aggregates = OwnAggregates(context.comms, self._windows, folder)
        self._done: set[int] = set()
        self._tried: dict[int, int] = {}  # by window: the network's window at the last attempt

    async def run(self) -> None:
        """Run until cancelled."""
        start = await start_window(self._context, self._hparams.start_horizon_windows)
        async for tick in self._context.clock.ticks():
            for window in self._due(start, newest=tick.window - 1):
                with in_window(window):
                    await self._aggregate(window, late=window < tick.window - 1)
            await self._aggregates.drop_before(tick.window - self._hparams.gradient_retention_windows)
            await self._comms.cleanup_aggregates(tick.window)

    def _due(self, start: int, newest: int) -> list[int]:
        """Return the newest window and one unpublished earlier window: the one tried longest ago; ties: the newest."""
        oldest = max(start, newest - self._hparams.gradient_retention_windows + 1)
        self._done = {window for window in self._done if window >= oldest}
        self._tried = {window: last for window, last in self._tried.items() if window >= oldest}
        gaps = [window for window in range(newest - 1, oldest - 1, -1) if window not in self._done]
        return [newest, *sorted(gaps, key=lambda window: self._tried.get(window, -1))[:1]] if newest >= start else []

    async def _aggregate(self, window: int, *, late: bool) -> None:
        """Publish the aggregate of a window unless it is already published. A failure is retried later."""
        began = time.monotonic()
        self._tried[window] = self._context.clock.window
        try:
            # Gather while the electors decide, so that the updates of the decided set are already here.
            own = None if late else await self._windows.from_peers(window)
            await failpoint("found")
            included = await self._windows.decided(window)
            if included is None:
                logger.info("not decided yet")
                return
            if await self._comms.own_aggregate(included) is None:
                await self._aggregates.publish(included, own)
                logger.info("aggregate published: %s", included.describe())
                announce(self._context.telemetry, included, time.monotonic() - began)
        except (ChainUnavailable, PayloadError, StateError, StoreError, WindowLost) as error:
            logger.warning("not aggregated yet: %s", error)
            self._context.telemetry.emit("problem", text=f"window {window} not aggregated yet: {error}")
            return
        self._done.add(window)
        del self._tried[window]
        await self._aggregates.drop(window)
