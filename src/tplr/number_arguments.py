"""Numbers as command-line arguments: functions for ``type`` of ``argparse``, each of which accepts one range."""

import argparse

MAX_NUMBER = 1e9  # no option has a sensible value above it, and products of it do not overflow


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
