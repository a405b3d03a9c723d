"""The terminal of commands."""

import io

import pytest

from tplr.console import Console


class Unread(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_an_output_that_nobody_reads_is_an_error_and_not_the_end() -> None:
    with pytest.raises(BrokenPipeError):
        Console(file=Unread()).print("a line")
