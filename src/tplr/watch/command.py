"""``tplr watch``: draws frames until it is interrupted, or a single frame."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

from tplr.errors import TplrError
from tplr.watch.display import open_live
from tplr.watch.frame import Frame, render_frame

DRAW_SECONDS = 1.0
KEPT_WARNINGS = 3


class Source(Protocol):
    """A source of frames; ``seconds`` is the time between two reads."""

    @property
    def seconds(self) -> float: ...

    async def look(self) -> Frame: ...


async def watch(source: Source, console: Console, *, once: bool = False) -> None:
    """Show frames: in place in a terminal, otherwise one for each new window; with ``once``, a single frame.

    Errors of the first read are raised. A later error is shown below the last good frame, with the warnings since the
    read before, until the next read.
    """
    frame = await source.look()
    if once:
        console.print(render_frame(frame))
        return
    printed = _Printer(console)
    with (
        _collected_warnings(console.is_terminal) as warnings,
        open_live(console, lambda one: render_frame(one, lines=console.height), printed.show) as show,
    ):
        due, looking = time.monotonic() + source.seconds, None
        notes: tuple[str, ...] = ()
        try:
            while True:
                show(frame.noting(*notes))
                await asyncio.sleep(min(DRAW_SECONDS, source.seconds))
                if looking is None and time.monotonic() >= due:
                    looking = asyncio.create_task(source.look())
                elif looking and looking.done():
                    due, problem = time.monotonic() + source.seconds, looking.exception()
                    notes = tuple(warnings)
                    warnings.clear()
                    if problem is None:
                        frame = looking.result()
                    elif isinstance(problem, TplrError | OSError):
                        notes = (f"not read: {problem}", *notes)
                    else:
                        raise problem
                    looking = None
        finally:
            if looking:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)


class _Printer:
    """Prints a frame when its window or its problems have changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: object = None

    def show(self, frame: Frame) -> None:
        now = (frame.view.clock and frame.view.clock.window, frame.notes)
        if now != self._last:
            self._console.print(render_frame(frame))
        self._last = now


@contextmanager
def _collected_warnings(collect: bool) -> Iterator[deque[str]]:
    """Collect the last warnings instead of logging them, because a line on a terminal would break the frame."""
    last: deque[str] = deque(maxlen=KEPT_WARNINGS)
    if not collect:
        yield last
        return

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and (text := record.getMessage()) not in last:
                last.append(text)

    root = logging.getLogger()
    collectors: list[logging.Handler] = [Collector()]
    before, root.handlers = root.handlers, collectors
    try:
        yield last
    finally:
        root.handlers = before
