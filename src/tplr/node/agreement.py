"""Whether this node still goes the network's way: what it applied, against what was published of the same windows."""

from dataclasses import dataclass
from typing import Any

from tplr.comms import Comms
from tplr.exchange.gather import GatherResult
from tplr.logging import logger
from tplr.node.holdings import leaders_report
from tplr.node.windows import WindowUpdates

# Reports and sets older than this will not come any more.
REMEMBERED_WINDOWS = 32


@dataclass
class _Applied:
    included: dict[int, str]
    fingerprint: str
    set_known: bool
    report_known: bool = False


class Agreement:
    """Remembers the last windows until both their included set and the leading validator's fingerprint are known."""

    def __init__(self, comms: Comms, windows: WindowUpdates) -> None:
        self._comms = comms
        self._windows = windows
        self._applied: dict[int, _Applied] = {}
        self._redone: set[int] = set()

    def note(self, gathered: GatherResult[Any], fingerprint: str) -> None:
        """A window was applied."""
        included = {one.uid: one.sha256 for one in gathered.updates}
        self._applied[gathered.window] = _Applied(included, fingerprint, gathered.published)
        oldest = gathered.window - REMEMBERED_WINDOWS
        self._applied = {window: mine for window, mine in self._applied.items() if window >= oldest}
        self._redone = {window for window in self._redone if window >= oldest}

    async def first_astray(self) -> int | None:
        """The first window after which this node held something else than the network, or None.

        It and all later ones are then forgotten: they will be applied anew. A window that differs even so is let be,
        and named in the log: the same updates give other numbers on another kind of device.
        """
        for window, mine in sorted(self._applied.items()):
            if not mine.set_known and await self._other_set(window, mine):
                return self._astray(window)
            if not mine.report_known and await self._other_model(window, mine):
                return self._astray(window)
            if not mine.report_known:
                break  # nor will there be one of a later window
        return None

    def _astray(self, window: int) -> int:
        self._redone.add(window)
        self._applied = {earlier: mine for earlier, mine in self._applied.items() if earlier < window}
        return window

    async def _other_set(self, window: int, mine: _Applied) -> bool:
        included = await self._windows.published(window)
        if included is None:
            return False
        mine.set_known = True
        if {one.uid: one.sha256 for one in included.included} == mine.included:
            return False
        logger.warning("window %d: the included set names other updates than were applied here", window)
        return True

    async def _other_model(self, window: int, mine: _Applied) -> bool:
        report = await leaders_report(self._comms, window)
        if report is None:
            return False
        mine.report_known = True
        if report.fingerprint == mine.fingerprint:
            return False
        if window in self._redone:
            logger.error(
                "window %d: the leading validator holds another model, although the same updates were applied: "
                "is this another kind of device, or is its memory at fault?",
                window,
            )
            return False
        logger.warning("window %d: the leading validator holds another model than this node", window)
        return True
