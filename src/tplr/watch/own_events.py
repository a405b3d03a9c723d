"""Source of ``tplr watch --events``: reads a node's own events as its file grows."""

import asyncio
from pathlib import Path

from tplr.errors import ConfigError
from tplr.telemetry.jsonl import START, Position, find_event, read_events, rotated
from tplr.watch.frame import Frame, loss_fact
from tplr.watch.view import NetworkView

COLUMNS = ("node", "doing", "uid", "window", "loss", "use", "gathered", "kB", "missed", "score", "weight")
SECONDS = 1.0  # between two reads


class EventsSource:
    """The frames of one node's event file.

    Attributes:
        seconds: time between two reads.
    """

    seconds = SECONDS

    def __init__(self, path: Path) -> None:
        """Create a source. Raises ConfigError if there is no such file."""
        if not path.is_file():
            found = "expected a file" if path.exists() else "no such file"
            raise ConfigError(f"--events {path}: {found}; a node writes it if it is started with --events")
        self._path = path
        self._name = path.stem
        self._view = NetworkView({})
        self._position = START
        self._read = False

    async def look(self) -> Frame:
        """Return a frame of all events so far. Raises OSError, or ConfigError for a line that is not a node's event."""
        events, self._position = await asyncio.to_thread(self._new_events)
        if events and not self._view.nodes:
            try:
                roles = {self._name: str(events[0]["role"])}
            except (KeyError, TypeError):
                raise ConfigError(f"--events {self._path}: not the events of a node") from None
            self._view = NetworkView(roles)
            self._view.nodes[self._name].running = True
        for event in events:
            try:
                self._view.update(self._name, [event])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                reason = f"no field {error}" if isinstance(error, KeyError) else repr(error)
                place = await asyncio.to_thread(find_event, self._path, event)
                raise ConfigError(f"--events {place}: a damaged event: {reason}") from None
        notes = () if self._view.nodes else (f"{self._path} holds no events yet",)
        return Frame(f"templar: {self._name}", self._view, COLUMNS, loss_fact(self._view), notes)

    def _new_events(self) -> tuple[list[dict], Position]:
        before = []
        if not self._read:
            before, _ = read_events(rotated(self._path))
            self._read = True
        events, position = read_events(self._path, self._position)
        return [*before, *events], position
