"""Targets of the scoreboard are met or missed by median and worst seed."""

import pytest

from tplr.localnet.targets import TARGETS, Target, missed


def test_a_bound_from_above_looks_at_the_largest_and_one_from_below_at_the_least() -> None:
    at_most, at_least = Target("pay", 0.1, 0.3), Target("order", 1.0, 0.9, least=True)
    assert at_most.reached([0.3, 0.0, 0.1]) == (0.1, 0.3)
    assert at_least.reached([1.2, 0.95, 1.0]) == (1.0, 0.95)
    assert at_most.met([0.3, 0.0, 0.1])
    assert at_least.met([1.2, 0.95, 1.0])


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.31], [0.0, 0.11, 0.11]])
def test_either_bound_fails_alone(values: list[float]) -> None:
    assert not Target("pay", 0.1, 0.3).met(values)


def test_what_is_missed_is_named_with_its_figures() -> None:
    runs = [{"go dark": 0.0, "no target": 9.0}, {"go dark": 0.5, "no target": 9.0}]
    assert missed(runs) == ["go dark: 0.25, worst 0.5; 0, 0"]
    assert missed([{"go dark": 0.0}]) == []


def test_each_figure_has_one_target() -> None:
    names = [one.figure for one in TARGETS]
    assert len(names) == len({*names})
