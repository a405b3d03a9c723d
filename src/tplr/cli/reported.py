"""Ends a command in one line and status 2 after an error, or in silence if nobody reads its output any more."""

import select
import sys
from collections.abc import Callable

from tplr.errors import TplrError
from tplr.logging import logger, setup_logging

FAILED = 2


def run_reported(
    function: Callable[[], int], *, debug: bool = False, report: Callable[[str], None] = logger.error
) -> int:
    """Call ``function``; return its exit status, or ``FAILED`` after an error of this package or of the system.

    Args:
        report: prints the text of the error.

    Raises:
        BrokenPipeError: the reader of standard output has ended; ``cli.main`` ends in silence then.
    """
    setup_logging(debug=debug)
    try:
        return function()
    except (TplrError, OSError, ExceptionGroup) as caught:
        error: Exception = caught
        while isinstance(error, ExceptionGroup):  # the first failure of several concurrent reads
            error = error.exceptions[0]
        if not isinstance(error, TplrError | OSError):
            raise
        if isinstance(error, BrokenPipeError) and output_unread():
            raise error from None
        report(_text(error))
        return FAILED


def _text(error: Exception) -> str:
    """Return the text of an error, without the number of an error of the system that names a file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def output_unread() -> bool:
    """Return whether standard output is a pipe or a socket whose reader has ended."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # none, replaced, or closed
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
