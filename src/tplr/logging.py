"""The package's logger; each line shows the node's name and its current window."""

import contextlib
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


def setup_logging(*, debug: bool = False, trace: bool = False) -> None:
    """Send this package's log lines to standard error, and of other libraries only warnings.

    Their DEBUG lines stay off even with ``trace``: some contain whole frames, including credentials.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Context())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(where)-18s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(TRACE if trace else logging.DEBUG if debug else logging.INFO)


def name_node(name: str) -> None:
    """Show ``name`` (such as ``miner 3``) in all lines of this context."""
    _node.set(name)


@contextlib.contextmanager
def in_window(window: int) -> Iterator[None]:
    """Show ``window`` in the lines logged inside the block."""
    token = _window.set(window)
    try:
        yield
    finally:
        _window.reset(token)
