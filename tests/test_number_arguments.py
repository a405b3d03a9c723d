"""Types of numbers on the command line: what they accept, and how they refuse."""

import argparse

import pytest

from tplr.number_arguments import number_problems, port, positive_count, positive_number


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


def test_all_numbers_that_are_out_of_range_are_listed():
    given = argparse.Namespace(ranks=1025, down=float("nan"), host_memory=-1.0, up=1e9, disk=None)
    assert number_problems(given, ["ranks", "down", "host_memory", "up", "disk"]) == [
        "--ranks 1025: expected a number above 0, at most 1024",
        "--down nan: expected a number above 0, at most 1e+09",
        "--host-memory -1.0: expected a number above 0, at most 1e+09",
    ]
