"""An aggregator: right after a window's time bound, say which updates it consists of, and publish these together."""

import time

from tplr.compress.layout import PayloadSpec
from tplr.errors import ChainUnavailable, PayloadError, PreconditionFailed, StoreError
from tplr.exchange.aggregates import IncludedSet, included_set
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.leader import start_window
from tplr.node.replica import Borders
from tplr.node.windows import WindowUpdates


class Aggregator:
    """Holds no model: what it publishes are the peers' own bytes.

    A set is written once. What a restarted aggregator finds of earlier windows it completes, one for each new window.
    """

    def __init__(self, borders: Borders, hparams: HParams, spec: PayloadSpec) -> None:
        self._borders = borders
        self._comms = borders.comms
        self._hparams = hparams
        self._windows = WindowUpdates(borders.comms, hparams, spec)
        self._done: set[int] = set()

    async def run(self) -> None:
        """Work until cancelled."""
        start = await start_window(self._borders)
        async for tick in self._borders.clock.ticks():
            newest = tick.window - 1
            oldest = max(start, newest - self._hparams.gradient_retention_windows + 1)
            self._done = {window for window in self._done if window >= oldest}
            gaps = [window for window in range(oldest, newest) if window not in self._done]
            for window in [newest, *gaps[:1]] if newest >= start else []:
                with in_window(window):
                    await self._aggregate(window)
            await self._comms.cleanup_aggregates(tick.window)

    async def _aggregate(self, window: int) -> None:
        """Publish a window's set and updates, or what of them is missing. What fails now is tried again later."""
        if window in self._done:
            return
        began = time.monotonic()
        try:
            included = await self._comms.get_included(window)
            if included is None:
                found = await self._windows.own_finding(window)
                included = included_set(found, self._hparams.version)
                try:
                    await self._comms.put_included(included)
                except PreconditionFailed:
                    logger.info("another aggregator was first")
                    return
            elif await self._comms.get_aggregate(included) is None:
                found = await self._windows.of(window)
            else:
                self._done.add(window)
                return
            await self._comms.put_aggregate(included, [one.update.body for one in found.updates])
        except (ChainUnavailable, PayloadError, StoreError) as error:
            logger.warning("not aggregated yet: %s", error)
            return
        self._done.add(window)
        self._tell(included, time.monotonic() - began)

    def _tell(self, included: IncludedSet, seconds: float) -> None:
        uids = [one.uid for one in included.included]
        size = sum(one.size for one in included.included)
        logger.info("window %d is %s, %.2f MB; skipped %s", included.window, uids, size / 1e6, included.skipped)
        self._borders.telemetry.emit(
            "aggregated",
            window=included.window,
            included=uids,
            skipped=included.skipped,
            bytes=size,
            success_rate=included.success_rate,
            seconds=seconds,
        )
