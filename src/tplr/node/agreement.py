"""Detects divergence from the network: compares the windows that this node applied with the published ones."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tplr.comms import Comms
from tplr.errors import StateError, StoreUnavailable
from tplr.exchange.gather import GatherResult
from tplr.logging import logger
from tplr.node.windows import WindowUpdates, agreed_report
from tplr.schemas import DebugReport

# Reports and sets of older windows are no longer awaited.
REMEMBERED_WINDOWS = 32
MAX_REPAIRS = 2
# If electors do not answer for so many windows, they are asked again with the next window: each request may take
# seconds, and the next window waits for them.
MAX_SILENT = 2


class Divergence(NamedTuple):
    """A difference between this node and the network.

    Attributes:
        window: the first window after which they differ.
        local_state_failed: this node has already returned to its own saved state, and still differs.
    """

    window: int
    local_state_failed: bool


@dataclass
class _Applied:
    """A window as this node applied it.

    Attributes:
        included: uid (as text) to the SHA-256 of its update.
        fingerprint, outer_fingerprint: as in ``DebugReport``.
        set_known, report_known: the published set, or most electors' report, has been compared.
    """

    included: dict[str, str]
    fingerprint: str
    outer_fingerprint: str
    set_known: bool
    report_known: bool = False


class Agreement:
    """Keeps the last windows until their included set and most electors' fingerprint are known.

    It is saved with the model, because a restarted node may have to roll back to before its last stop.
    """

    def __init__(self, comms: Comms, windows: WindowUpdates) -> None:
        self._comms = comms
        self._windows = windows
        self._applied: dict[int, _Applied] = {}
        self._redone: set[int] = set()  # windows rolled back because of their included set
        self._repairs = 0  # rollbacks since the fingerprints of ``_repaired``, or of a later window, were equal
        self._repaired = -1  # the last window that was rolled back because of the model

    def note(self, gathered: GatherResult[Any], report: DebugReport) -> None:
        """Record an applied window, and this node's report of it."""
        self._applied[gathered.window] = _Applied(
            report.included, report.fingerprint, report.outer_fingerprint, gathered.published
        )
        oldest = gathered.window - REMEMBERED_WINDOWS
        self._applied = {window: mine for window, mine in self._applied.items() if window >= oldest}
        self._redone = {window for window in self._redone if window >= oldest}

    def forget(self) -> None:
        """Drop all records: the present model does not follow from these windows."""
        self._applied = {}

    async def first_divergence(self) -> Divergence | None:
        """Return the first divergence, or None. The records of that window and of all later ones are then dropped.

        A difference in the included set causes one rollback of the window. A difference in the model causes two in a
        row: to this node's own state, then to a checkpoint. If the model still differs, the node continues and logs an
        error, because the same updates give different numbers on a different kind of device.
        """
        silent = 0
        for window, mine in sorted(self._applied.items()):
            if mine.included and self._comms.is_voided(window):
                logger.warning("window %d was voided after this node applied it; rolling back", window)
                return self._forget(Divergence(window, local_state_failed=False))
            if silent == MAX_SILENT:
                continue
            if not mine.set_known and await self._other_set(window, mine):
                self._redone.add(window)
                return self._forget(Divergence(window, local_state_failed=False))
            try:
                other = not mine.report_known and await self._other_model(window, mine)
            except StoreUnavailable as error:
                logger.info("model after window %d not compared: %s", window, error)
                silent += 1
                continue
            if other:
                self._repairs += 1
                self._repaired = window
                return self._forget(Divergence(window, local_state_failed=self._repairs > 1))
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the records as plain JSON values."""
        return {
            "applied": {str(window): asdict(mine) for window, mine in self._applied.items()},
            "redone": sorted(self._redone),
            "repairs": self._repairs,
            "repaired": self._repaired,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Raises StateError if it is malformed."""
        try:
            self._applied = {int(window): _Applied(**mine) for window, mine in state["applied"].items()}
            self._redone = set(state["redone"])
            self._repairs, self._repaired = int(state["repairs"]), int(state["repaired"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"agreement: {error!r} in its saved state") from error

    def _forget(self, divergence: Divergence) -> Divergence:
        self._applied = {earlier: mine for earlier, mine in self._applied.items() if earlier < divergence.window}
        return divergence

    async def _other_set(self, window: int, mine: _Applied) -> bool:
        included = await self._windows.published(window)
        if included is None:
            return False
        mine.set_known = True
        if {str(one.uid): one.sha256 for one in included.included} == mine.included:
            return False
        if window in self._redone:
            logger.error("window %d: the included set can't be applied; keeping this node's own set", window)
            return False
        logger.warning("window %d: the included set differs from the applied one; rolling back", window)
        return True

    async def _other_model(self, window: int, mine: _Applied) -> bool:
        """Return whether most electors report another model. Raises StoreUnavailable if they do not answer."""
        report = None if self._comms.alone else await agreed_report(self._comms, window)
        if report is None:
            return False
        mine.report_known = True
        if (report.fingerprint, report.outer_fingerprint) == (mine.fingerprint, mine.outer_fingerprint):
            if window >= self._repaired:  # windows before it are equal in every replay
                self._repairs = 0
            return False
        if self._repairs >= MAX_REPAIRS:
            logger.error(
                "window %d: this node's model still differs from most electors' after rollbacks to its own "
                "state and to a checkpoint: check for another kind of device or for faulty memory",
                window,
            )
            return False
        logger.warning("window %d: this node's model differs from most electors'; rolling back", window)
        return True
