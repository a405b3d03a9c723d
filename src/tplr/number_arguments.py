"""Ranges of numbers on the command line: functions for ``type`` of ``argparse``, and a check of several at once."""

import argparse
from collections.abc import Sequence

MAX_NUMBER = 1e9  # no option has a sensible value above it, and products of it do not overflow
MAX_RANKS = 1024


def positive_count(text: str) -> int:
    """Accept a whole number from 1 on."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1 on")
    return number


def positive_number(text: str) -> float:
    """Accept a number above 0, at most ``MAX_NUMBER``; not NaN."""
    if not 0 < (number := float(text)) <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0, at most {MAX_NUMBER:g}")
    return number


def port(text: str) -> int:
    """Accept the number of a port; 0 selects a free one."""
    if not 0 <= (number := int(text)) < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 to 65535")
    return number


def number_problems(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return a problem for each given argument of ``names`` that is not above 0 or is too large; NaN is, too."""
    return [
        f"--{name.replace('_', '-')} {value}: expected a number above 0, at most {most:g}"
        for name in names
        for value, most in [(getattr(args, name), MAX_RANKS if name == "ranks" else MAX_NUMBER)]
        if value is not None and not 0 < value <= most
    ]
