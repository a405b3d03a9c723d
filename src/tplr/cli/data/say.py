"""A verb's results: lines on standard output; progress and warnings are the log's, on standard error."""

import sys


def say(line: str) -> None:
    """Write one line."""
    sys.stdout.write(f"{line}\n")
