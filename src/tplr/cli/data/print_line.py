"""Prints a verb's results as lines on standard output; progress and warnings go to the log, on standard error."""

import sys


def print_line(line: str) -> None:
    """Write one line."""
    sys.stdout.write(f"{line}\n")
