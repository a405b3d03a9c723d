"""Types of numbers on the command line: what they accept, and how they refuse."""

import argparse

import pytest

from tplr.number_arguments import port, positive_count, positive_number


@pytest.mark.parametrize(
    ("kind", "text", "number"),
    [(positive_count, "1", 1), (positive_number, "0.5", 0.5), (positive_number, "1e9", 1e9), (port, "0", 0)],
)
def test_numbers_in_range_are_accepted(kind, text, number):
    assert kind(text) == number


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (positive_count, ("0", "-1")),
        (positive_number, ("0", "-1", "nan", "inf", "1e300")),
        (port, ("-1", "65536", "99999")),
    ],
)
def test_other_numbers_are_refused_with_the_range(kind, texts):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text}: expected "):
            kind(text)
    with pytest.raises(ValueError, match="many"):  # argparse reports it
        kind("many")
