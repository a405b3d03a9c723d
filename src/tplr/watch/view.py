"""The state of a network from events or published documents: one ``NetworkView``, which displays read.

Events of one node arrive in order; events of different nodes arrive in any order.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tplr.telemetry.events import Event

# Activity of a node after each event.
NEXT = {
    "started": "waiting",
    "trained": "uploading",
    "uploaded": "gathering",
    "missed": "gathering",
    "baseline": "measuring",
    "scores": "applying",
    "applied": "next window",
    "aggregated": "next window",
    "rolled_back": "rolling back",
    "restored": "catching up",
    "stopped": "stopped",
    "attacked": "lying",
}


@dataclass(frozen=True)
class Applied:
    """A window applied by a node. ``digest`` is empty in windows without a digest of the whole model."""

    included: tuple[int, ...]
    skipped: dict[int, str]
    fingerprint: str
    digest: str


@dataclass(frozen=True)
class Clock:
    """The last reading of the chain.

    Attributes:
        at: unix seconds of this reading.
        seconds_left: expected seconds until the window's end at that time; None if unknown.
        block_age: seconds since ``block`` was seen, at that time.
        window_seconds: expected length of a window.
    """

    window: int
    block: int
    at: float
    seconds_left: float | None
    block_age: float
    window_seconds: float

    def left(self, now: float) -> float | None:
        """Return the seconds until the window's end at the unix time ``now``; 0 while it is overdue."""
        return None if self.seconds_left is None else max(0.0, self.seconds_left - (now - self.at))


@dataclass(frozen=True)
class Election:
    """The election of a window's included set.

    Attributes:
        decided: whether more than half of the electors' stake is committed to one value.
        void: whether that value is no set.
        committed: known share of the stake that is committed to it; None if unknown.
    """

    decided: bool
    void: bool = False
    committed: float | None = None


@dataclass
class NodeView:
    """A node's state so far; dictionaries are by window unless named otherwise.

    Attributes:
        hostile: whether it is hostile; its own reports are then ignored.
        reached: unix seconds at which the node first applied each window.
        attacks: number of a hostile node's forgeries, by behaviour.
        running: whether its process is alive; set by the supervisor, not by events.
        stake: its share of the electors' stake; None if it is not an elector, or unknown.
        aggregated: uids of each included set that it published; aggregators only.
        update_bytes: size of its last update.
        utilisation: share of a window's time in which a miner trained.
        scores, weights: by uid, as last emitted; validators only.
        problem: the last problem, with its window if it has one.
        outdated: text that the network runs newer software or newer rules, with the remedy; else empty.
    """

    name: str
    role: str
    hostile: bool = False
    uid: int | None = None
    running: bool = False
    stake: float | None = None
    doing: str = "starting"
    training_loss: dict[int, float] = field(default_factory=dict)
    held_out_loss: dict[int, float] = field(default_factory=dict)
    applied: dict[int, Applied] = field(default_factory=dict)
    aggregated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    uploaded: set[int] = field(default_factory=set)
    missed: dict[int, str] = field(default_factory=dict)
    utilisation: dict[int, float] = field(default_factory=dict)
    update_bytes: int = 0
    parameters: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    problem: str = ""
    outdated: str = ""
    reached: dict[int, float] = field(default_factory=dict)
    attacks: Counter[str] = field(default_factory=Counter)

    @property
    def window(self) -> int | None:
        """Newest applied window; for an aggregator, which applies none, the newest aggregated window."""
        # A validator's elector publishes windows before its model applies them.
        return max(self.aggregated if self.role == "aggregator" else self.applied, default=None)

    def update(self, event: Event) -> None:
        """Process one event; other kinds are ignored."""
        self.uid = event.get("uid", self.uid)
        kind = event["event"]
        self.doing = NEXT.get(kind, self.doing)
        # A node that starts may have been upgraded. Older event files have no text.
        self.outdated = {"started": "", "outdated": event.get("text", "outdated")}.get(kind, self.outdated)
        match kind:
            case "trained" if event["loss"] is not None:
                self.training_loss[event["window"]] = event["loss"]
            case "uploaded":
                self.uploaded.add(event["window"])
                self.update_bytes, self.parameters = event["bytes"], event["parameters"]
            case "missed":
                self.missed[event["window"]] = event["reason"]
                self.problem = f"window {event['window']} missed: {event['reason']}"
            case "window_time" if self.role == "miner" and event["seconds"]:
                self.utilisation[event["window"]] = event["training"] / event["seconds"]
            case "baseline":
                self.held_out_loss[event["window"]] = event["held_out_loss"]
            case "scores":
                self.scores = _by_uid(event["scores"])
            case "weights":
                self.weights = _by_uid(event["weights"])
            case "attacked":
                self.attacks[event["behaviour"]] += 1
            case "applied":
                self.reached.setdefault(event["window"], event["time"])
                self.applied[event["window"]] = Applied(
                    included=tuple(event["included"]),
                    skipped=_by_uid(event["skipped"]),
                    fingerprint=event["fingerprint"],
                    digest=event["digest"],
                )
            case "rolled_back":
                self.applied = {window: one for window, one in self.applied.items() if window < event["window"]}
                self.problem = f"diverged from the network in window {event['window']}: rolled back"
            case "aggregated":
                self.aggregated[event["window"]] = tuple(event["included"])
            case "problem":
                self.problem = event["text"]


class NetworkView:
    """All nodes by name, and figures of the network, which exclude hostile nodes.

    Attributes:
        clock: the newest reading of any node; None before the first.
        elections: known elections by window.
    """

    def __init__(self, roles: Mapping[str, str], hostile: Container[str] = ()) -> None:
        """``roles`` by node name, including nodes without events; ``hostile``: names of hostile nodes."""
        self.nodes = {name: NodeView(name, role, name in hostile) for name, role in roles.items()}
        self.clock: Clock | None = None
        self.elections: dict[int, Election] = {}

    @property
    def honest(self) -> list[NodeView]:
        """All nodes except hostile ones."""
        return [node for node in self.nodes.values() if not node.hostile]

    @property
    def hostile(self) -> list[NodeView]:
        """The hostile nodes."""
        return [node for node in self.nodes.values() if node.hostile]

    def update(self, name: str, events: Iterable[Event]) -> None:
        """Process the next events of one node."""
        node = self.nodes[name]
        for event in events:
            node.update(event)
            if node.hostile:
                continue
            match event["event"]:
                case "pulse" if self.clock is None or event["window"] >= self.clock.window:
                    self.clock = _clock(event)
                case "aggregated" if node.role == "validator":
                    # An empty set may be void or not, depending on the peer list, which no event contains.
                    self.elections[event["window"]] = Election(decided=True)

    @property
    def miners(self) -> list[NodeView]:
        """The miners, in the order of ``roles``."""
        return [node for node in self.honest if node.role == "miner"]

    @property
    def validators(self) -> list[NodeView]:
        """The validators, in the order of ``roles``."""
        return [node for node in self.honest if node.role == "validator"]

    @property
    def validator(self) -> NodeView:
        """The first validator, whose figures are shown. Raises IndexError if there is none."""
        return self.validators[0]

    @property
    def judge(self) -> NodeView | None:
        """The first validator with scores, whose scores and weights are shown."""
        return next((node for node in self.validators if node.scores or node.weights), None)

    def inclusions(self, uid: int) -> tuple[int, int]:
        """Return the number of windows in which the update of ``uid`` was applied, and in which it was requested."""
        sets = {window: one for node in self.honest for window, one in node.applied.items()}
        included = sum(uid in one.included for one in sets.values())
        return included, included + sum(uid in one.skipped for one in sets.values())

    @property
    def aggregates(self) -> bool:
        """Whether an aggregator is part of the network."""
        return any(node.role == "aggregator" for node in self.honest)

    @property
    def included(self) -> dict[int, tuple[int, ...]]:
        """Published included sets by window."""
        return {window: uids for node in self.honest for window, uids in node.aggregated.items()}

    @property
    def start_window(self) -> int | None:
        """First window of the run, at which every node begins; None before it is applied."""
        return min((min(node.applied) for node in self.honest if node.applied), default=None)

    @property
    def completed(self) -> int:
        """Number of windows of the run that all nodes have applied."""
        newest = [node.window for node in self.honest]
        start = self.start_window
        if start is None:
            return 0
        return min(-1 if window is None else window - start for window in newest) + 1

    @property
    def newest(self) -> int:
        """The newest window that any node has applied; 0 before the run."""
        return max((node.window for node in self.honest if node.window is not None), default=0)

    @property
    def furthest(self) -> int:
        """Number of windows of the run up to ``newest``."""
        return 0 if self.start_window is None else self.newest - self.start_window + 1

    def disagreements(self) -> dict[int, dict[str, str]]:
        """Return the windows after which models differed: window → fingerprint by node name."""
        windows = sorted({window for node in self.honest for window in node.applied})
        return {window: held for window in windows if len(set((held := self._held(window)).values())) > 1}

    def _held(self, window: int) -> dict[str, str]:
        """Return fingerprint and digest after ``window``, by node name."""
        return {
            node.name: f"{applied.fingerprint} {applied.digest}".rstrip()
            for node in self.honest
            if (applied := node.applied.get(window))
        }

    def shared_windows(self) -> list[int]:
        """Return the windows that at least two nodes applied."""
        counts: dict[int, int] = {}
        for node in self.honest:
            for window in node.applied:
                counts[window] = counts.get(window, 0) + 1
        return sorted(window for window, count in counts.items() if count > 1)


def _clock(pulse: Event) -> Clock:
    return Clock(
        window=pulse["window"],
        block=pulse["block"],
        at=pulse["time"],
        seconds_left=pulse.get("seconds_left"),  # not in older files
        block_age=pulse["block_age"],
        window_seconds=pulse["window_seconds"],
    )


def _by_uid(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(uid): value for uid, value in values.items()}
