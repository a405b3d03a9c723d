"""Whether this node still goes the network's way: what it applied, against what was published of the same windows."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tplr.comms import Comms
from tplr.errors import StateError
from tplr.exchange.gather import GatherResult
from tplr.logging import logger
from tplr.node.windows import WindowUpdates, leaders_report

# Reports and sets older than this will not come any more.
REMEMBERED_WINDOWS = 32
MAX_REPAIRS = 2


class Divergence(NamedTuple):
    """``window`` is the first after which this node held something else than the network.

    Attributes:
        helpless: a state of this node's own from before that window did not help.
    """

    window: int
    local_state_failed: bool


@dataclass
class _Applied:
    """What was applied in a window: uid (as text) to SHA-256, and what the model was then."""

    included: dict[str, str]
    fingerprint: str
    set_known: bool
    report_known: bool = False


class Agreement:
    """Remembers the last windows until both their included set and the leading validator's fingerprint are known.

    Part of the saved state: a node that is restarted may have to go back to before its end.
    """

    def __init__(self, comms: Comms, windows: WindowUpdates) -> None:
        self._comms = comms
        self._windows = windows
        self._applied: dict[int, _Applied] = {}
        self._redone: set[int] = set()  # for their set
        self._repairs = 0  # since the models were last seen to be equal

    def note(self, gathered: GatherResult[Any], fingerprint: str) -> None:
        """A window was applied."""
        included = {str(one.uid): one.sha256 for one in gathered.updates}
        self._applied[gathered.window] = _Applied(included, fingerprint, gathered.published)
        oldest = gathered.window - REMEMBERED_WINDOWS
        self._applied = {window: mine for window, mine in self._applied.items() if window >= oldest}
        self._redone = {window for window in self._redone if window >= oldest}

    async def first_astray(self) -> Divergence | None:
        """Where this node left the network's way, or None.

        That window and all later ones are then forgotten: they will be applied anew. A node is set right for its set
        once a window, and for its model twice in a row: from its own state, then from a checkpoint. If it differs even
        so it goes on, and the log says it: the same updates give other numbers on another kind of device.
        """
        for window, mine in sorted(self._applied.items()):
            if not mine.set_known and await self._other_set(window, mine):
                self._redone.add(window)
                return self._forget(Divergence(window, local_state_failed=False))
            if not mine.report_known and await self._other_model(window, mine):
                self._repairs += 1
                return self._forget(Divergence(window, local_state_failed=self._repairs > 1))
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "applied": {str(window): asdict(mine) for window, mine in self._applied.items()},
            "redone": sorted(self._redone),
            "repairs": self._repairs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state. Raises StateError."""
        try:
            self._applied = {int(window): _Applied(**mine) for window, mine in state["applied"].items()}
            self._redone, self._repairs = set(state["redone"]), int(state["repairs"])
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
            logger.error("window %d: its included set can't be followed: going on with what was found", window)
            return False
        logger.warning("window %d: the included set names other updates than were applied here", window)
        return True

    async def _other_model(self, window: int, mine: _Applied) -> bool:
        report = None if self._comms.leads else await leaders_report(self._comms, window)
        if report is None:
            return False
        mine.report_known = True
        if report.fingerprint == mine.fingerprint:
            self._repairs = 0
            return False
        if self._repairs >= MAX_REPAIRS:
            logger.error(
                "window %d: the leading validator holds another model, and neither this node's own state nor a "
                "checkpoint helped: is this another kind of device, or is its memory at fault?",
                window,
            )
            return False
        logger.warning("window %d: the leading validator holds another model than this node", window)
        return True
