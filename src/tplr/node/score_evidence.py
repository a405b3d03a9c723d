"""Reads the evidence that published scores follow from, to explain how credit follows from it."""

import asyncio
from typing import Protocol

from tplr.errors import PayloadError, StoreError
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.schemas import ScoreReport
from tplr.scoring.board import CreditShares
from tplr.scoring.explain import measured_window, shares_of
from tplr.scoring.measured_window import MeasuredWindow
from tplr.storage.many import for_each

REPORTS_AT_ONCE = 8


class ScoreReader(Protocol):
    """Where score reports are read: ``Comms``."""

    async def get_scores(self, uid: int, window: int) -> ScoreReport: ...


class ScoreEvidence:
    """The evidence of score reports; it keeps that of the last ``2 * pay_windows`` windows.

    Args:
        comms: where the reports are read.
    """

    def __init__(self, comms: ScoreReader, hparams: HParams) -> None:
        self._comms = comms
        self._hparams = hparams
        self._known: dict[tuple[int, int], MeasuredWindow] = {}  # by window and validator
        self._lock = asyncio.Lock()

    async def shares(self, report: ScoreReport, validator: int) -> CreditShares | None:
        """How the credits of a report of ``validator`` follow; None if ``shares_of`` says so, or a report is not there.

        Raises:
            PayloadError: ``report`` contradicts itself.
        """
        if report.profile == "documented" or not self._is_recent(report):
            return None
        # One report after the other: most of what the next one follows from has then been read.
        async with self._lock:
            own = await asyncio.to_thread(measured_window, report, self._hparams)
            try:
                await self._read(report, validator)
            except (PayloadError, StoreError) as error:
                logger.warning("window %d: the credits are not explained: %s", report.window, error)
                return None
            self._known[report.window, validator] = own
            windows = [self._known[window, validator] for window in (*report.follows_from, report.window)]
            for key in sorted(self._known)[: -2 * self._hparams.pay_windows]:
                del self._known[key]
            return await asyncio.to_thread(shares_of, report, windows, self._hparams.probation_windows)

    def _is_recent(self, report: ScoreReport) -> bool:
        """Whether it follows from windows that may count: its author could name any."""
        last = range(report.window - self._hparams.pay_windows + 1, report.window)
        ascending = list(report.follows_from) == sorted({*report.follows_from})
        return ascending and all(window in last for window in report.follows_from)

    async def _read(self, report: ScoreReport, validator: int) -> None:
        async def read(window: int) -> None:
            found = await self._comms.get_scores(validator, window)
            if found.window != window:
                raise PayloadError(f"the scores of window {window} say window {found.window}")
            self._known[window, validator] = await asyncio.to_thread(measured_window, found, self._hparams)

        missing = [window for window in report.follows_from if (window, validator) not in self._known]
        await for_each(missing, read, concurrency=REPORTS_AT_ONCE)
