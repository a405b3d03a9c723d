"""The package's logger; each line shows the node's name and its current window."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar

logger = logging.getLogger("tplr")

_node: ContextVar[str] = ContextVar("node", default="-")
_window: ContextVar[int | None] = ContextVar("window", default=None)

TRACE = 5  # below DEBUG: every request
logging.addLevelName(TRACE, "TRACE")


class _Context(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        window = _window.get()
        record.where = _node.get() if window is None else f"{_node.get()} w{window}"
        return True


class _JsonLines(logging.Formatter):
    """One JSON object per line: ``time`` (Unix seconds), ``level``, ``logger``, ``node``, ``window``, ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": _node.get(),
            "window": _window.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup_logging(*, debug: bool = False, trace: bool = False, json_lines: bool = False) -> None:
    """Send this package's log lines, and other libraries' warnings, to standard error.

    DEBUG lines of other libraries are disabled even with ``trace``: some contain whole frames, including credentials.
    """
    handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(_JsonLines())
    else:
        handler.addFilter(_Context())
        text = "%(asctime)s %(levelname)-7s %(where)-18s %(message)s"
        handler.setFormatter(logging.Formatter(text, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(TRACE if trace else logging.DEBUG if debug else logging.INFO)


def take_over(*libraries: str) -> None:
    """Remove the handlers that these libraries install, so that their lines use only ours.

    Call it after their import. Otherwise each line appears twice, once in the library's format.
    """
    for name in libraries:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def name_node(name: str) -> None:
    """Show ``name`` (such as ``miner 3``) in all lines of this context."""
    _node.set(name)


@contextlib.contextmanager
def in_window(window: int) -> Iterator[None]:
    """Show ``window`` in the lines that are logged inside the block."""
    token = _window.set(window)
    try:
        yield
    finally:
        _window.reset(token)
