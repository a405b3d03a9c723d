"""Prints a verb's results as lines on standard output; progress and warnings go to the log, on standard error."""

import sys

from tplr.untrusted import printable


def print_line(line: str) -> None:
    """Write a line, or several; names in somebody's data may hold control characters of the terminal."""
    sys.stdout.write("".join(f"{printable(one)}\n" for one in line.split("\n")))
