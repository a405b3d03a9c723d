"""Publishes a validator's score reports: at once, or the hash at once and the report when its weights are in force.

A sealed report is kept on disk. A validator that was killed after it had sealed a window does not score that window
again, because the published hash binds it to the report on disk. Its later scores must follow from what it published
after its last saved state, so it reads these reports again.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from tplr.comms import Comms
from tplr.errors import ObjectNotFound, PayloadError, PreconditionFailed, StateError, StoreError
from tplr.exchange.scores import released_after, seal_of
from tplr.files import atomic_write
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.failpoints import failpoint
from tplr.schemas import ScoreReport
from tplr.storage.many import for_each
from tplr.telemetry import Telemetry
from tplr.untrusted import parse_untrusted

READ_AT_ONCE = 8


class ScoreReports:
    """The reports of one validator; ``folder`` keeps the sealed ones."""

    def __init__(self, comms: Comms, telemetry: Telemetry, hparams: HParams, folder: Path) -> None:
        self._comms = comms
        self._telemetry = telemetry
        self._hparams = hparams
        self._folder = folder
        self._name = re.compile(rf"window-([0-9]{{1,15}})-v{re.escape(hparams.version)}")
        self._sealed: dict[int, bool] = {}  # windows on disk, and whether their hash is published
        self._listed = False
        self._readable = -1  # newest window whose report may be published, because its weights are in force

    async def kept(self, window: int) -> ScoreReport | None:
        """Load the report of a window that was sealed before a restart; None if there is none."""
        if not self._listed:
            # List only once: ``release`` may delete a report that is listed later before it is read.
            self._listed = True
            for found in await asyncio.to_thread(self._on_disk):
                self._sealed.setdefault(found, False)
        return await self._read(window) if window in self._sealed else None

    async def made(self, windows: Iterable[int]) -> list[ScoreReport]:
        """The reports of these windows that this validator has sealed or published, in their order."""
        found = {window: await self.kept(window) for window in windows}
        missing = [window for window, report in found.items() if report is None]
        found |= zip(missing, await for_each(missing, self._published, concurrency=READ_AT_ONCE), strict=True)
        return [report for report in found.values() if report is not None]

    async def _published(self, window: int) -> ScoreReport | None:
        """A report in this validator's bucket; None if it has none, or it can't be read, which is logged."""
        try:
            return await self._comms.get_scores(self._comms.uid, window)
        except ObjectNotFound:
            return None
        except (StoreError, PayloadError) as error:
            self._report_problem(f"own scores of window {window}, on which later ones depend, not read: {error}")
            return None

    async def publish(self, report: ScoreReport, *, weights_due: int) -> None:
        """Publish a report, or seal it. A failure is logged; publishing a hash is retried.

        Args:
            weights_due: window in which the next weights are due.
        """
        if not self._hparams.sealed_scores:
            await self._put(report)
            return
        salted = report.model_copy(update={"salt": secrets.token_hex(32)}).sealed()
        try:
            await asyncio.to_thread(atomic_write, self._path(report.window), salted.model_dump_json().encode())
        except StateError as error:
            self._report_problem(f"scores not stored, so neither sealed nor published: {error}")
            return
        self._sealed[report.window] = False
        await failpoint("sealed")
        await self.seal(weights_due=weights_due)

    async def seal(self, *, weights_due: int) -> None:
        """Publish the hashes that are not published yet."""
        for window in sorted(window for window, done in self._sealed.items() if not done):
            report = await self._read(window)
            if report is None:
                continue
            try:
                await self._comms.put_scores_seal(seal_of(report, weights_due=weights_due))
            except PreconditionFailed:
                self._report_problem(f"scores of window {window} dropped: the hash of another report is published")
                await self._forget(window)
            except (StoreError, PayloadError) as error:
                self._report_problem(f"hash of the scores of window {window} not published: {error}")
            else:
                self._sealed[window] = True

    async def release(self, in_force: int | None, *, newest: int) -> None:
        """Publish the sealed reports that may be published now.

        Args:
            in_force: newest window whose scores the weights in force are based on; None if that is unknown.
            newest: the present window.
        """
        self._readable = max(self._readable, -1 if in_force is None else in_force)
        until = max(self._readable, newest - released_after(self._hparams))
        for window in sorted(window for window, done in self._sealed.items() if done and window <= until):
            report = await self._read(window)
            if report is not None and not await self._put(report):
                return
            await self._forget(window)

    async def _put(self, report: ScoreReport) -> bool:
        """Publish a report; return whether that succeeded."""
        try:
            await self._comms.put_scores(report)
        except StoreError as error:
            self._report_problem(f"scores not published: {error}")
            return False
        return True

    async def _read(self, window: int) -> ScoreReport | None:
        """Read a report from disk; None if it is lost, which is logged."""
        path = self._path(window)
        try:
            body = await asyncio.to_thread(path.read_bytes)
            return parse_untrusted(body, ScoreReport, str(path))
        except (OSError, PayloadError) as error:
            self._report_problem(f"sealed scores of window {window} lost: {error}")
            await self._forget(window)
            return None

    async def _forget(self, window: int) -> None:
        self._sealed.pop(window, None)
        with contextlib.suppress(OSError):  # a file that remains is published again after a restart, unchanged
            await asyncio.to_thread(self._path(window).unlink, missing_ok=True)

    def _path(self, window: int) -> Path:
        return self._folder / f"window-{window}-v{self._hparams.version}"

    def _on_disk(self) -> list[int]:
        names = [path.name for path in self._folder.iterdir()] if self._folder.exists() else []
        return [int(match[1]) for name in names if (match := self._name.fullmatch(name))]

    def _report_problem(self, text: str) -> None:
        logger.warning("%s", text)
        self._telemetry.emit("problem", text=text)
