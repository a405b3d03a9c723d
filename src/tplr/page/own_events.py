"""Reads training losses and phase times, which only a node's operator has, from the node's event files."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tplr.errors import ConfigError
from tplr.node.window_time import PHASES
from tplr.telemetry.jsonl import START, read_events, rotated


@dataclass
class NodeEvents:
    """One node's events so far; dictionaries are by window.

    Attributes:
        held_out: loss on random pages; validators only.
        seconds: duration of each of ``PHASES``; miners only.
    """

    name: str
    role: str = ""
    uid: int | None = None
    training_loss: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def windows(self) -> set[int]:
        """The windows of these events."""
        return {*self.training_loss, *self.held_out, *self.seconds}

    def update(self, event: dict[str, Any]) -> None:
        self.uid, self.role = event.get("uid", self.uid), event.get("role", self.role)
        match event["event"]:
            case "trained" if event["loss"] is not None:
                self.training_loss[event["window"]] = event["loss"]
            case "baseline":
                self.held_out[event["window"]] = event["held_out_loss"]
            case "window_time" if self.role == "miner":
                self.seconds[event["window"]] = tuple(event[phase] for phase in PHASES)


class OwnEvents:
    """Event files of nodes, each named after its node, with those before a rotation; read incrementally."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._nodes = {path: NodeEvents(path.stem) for path in sorted(paths)}
        self._offsets = dict.fromkeys(self._nodes, START)

    def read(self) -> list[NodeEvents]:
        """Read new events, and return the events so far of each node with a known uid. Blocks.

        Raises:
            ConfigError: a line is not a node's event.
        """
        for path, node in self._nodes.items():
            before = read_events(rotated(path))[0] if self._offsets[path] == START else []
            events, self._offsets[path] = read_events(path, self._offsets[path])
            try:
                for event in (*before, *events):
                    node.update(event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"--read-events {path}: not the events of a node: {error!r}") from None
        return [node for node in self._nodes.values() if node.uid is not None]
