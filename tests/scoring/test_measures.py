"""Golden values of every formula, and which signs are told from chance."""

import math

import pytest

from tplr.schemas import OUT_OF_SYNC
from tplr.scoring.measures import (
    base_score,
    binary_indicator,
    gain,
    gradient_score,
    gradient_sign,
    moving_average,
    sync_score,
)


def test_gradient_score_is_the_relative_improvement_on_random_pages(evaluation) -> None:
    assert gradient_score(evaluation(random=0.1)) == pytest.approx(0.1)
    assert gradient_score(evaluation(random=-0.3)) == pytest.approx(-0.3)
    diverged = evaluation().model_copy(update={"random_after": None})
    assert gradient_score(diverged) == -1.0
    assert gradient_score(evaluation(random=-50.0)) == -1.0  # no score is worse than a loss that is not finite


def test_documented_indicator_is_plus_or_minus_one(evaluation) -> None:
    assert binary_indicator("documented", evaluation(own=0.02, random=0.01)) == 1
    assert binary_indicator("documented", evaluation(own=0.0, random=0.0)) == -1
    assert binary_indicator("documented", evaluation(own=0.01, random=0.02)) == -1
    assert gradient_sign("documented", evaluation(random=1e-9)) == 1


def test_hardened_indicator_counts_as_far_as_it_is_told_from_chance(evaluation) -> None:
    # Improvements of 2 % of 4 and 1 % of 5 nats: with an error of .01 nats on each side they differ by 3.1 errors.
    assert binary_indicator("hardened", evaluation(own=0.02, random=0.01, error=0.010)) == 1
    assert binary_indicator("hardened", evaluation(own=0.02, random=0.01, error=0.020)) == pytest.approx(0.7808688)
    assert binary_indicator("hardened", evaluation(own=0.01, random=0.02, error=0.020)) == pytest.approx(-0.7808688)
    assert binary_indicator("hardened", evaluation(error=1e9)) == pytest.approx(0.0, abs=1e-9)
    assert binary_indicator("hardened", evaluation(own=0.01, random=0.02, error=0.010)) == -1
    assert binary_indicator("hardened", evaluation(own=0.0, random=0.0, error=0.0)) == 0
    assert binary_indicator("hardened", evaluation().model_copy(update={"own_after": None})) == -1
    # 1 % of 5 nats is two errors of .025.
    assert gradient_sign("hardened", evaluation(random=0.01, error=0.024)) == 1
    assert gradient_sign("hardened", evaluation(random=0.01, error=0.026)) == 0
    assert gradient_sign("hardened", evaluation(random=-0.01, error=0.024)) == -1


def test_moving_average() -> None:
    assert moving_average(0.0, 1.0, 0.05) == pytest.approx(0.05)
    assert moving_average(0.5, -1.0, 0.05) == pytest.approx(0.425)


@pytest.mark.parametrize(
    ("behind", "score"), [(0, 1.0), (1, 0.5724334), (2, 0.2788548), (3, 0.1011929), (5, 0.0), (99, 0.0)]
)
def test_sync_score(behind: int, score: float) -> None:
    assert sync_score(behind) == pytest.approx(score, abs=1e-6)


def test_another_model_is_worth_nothing() -> None:
    assert sync_score(OUT_OF_SYNC) == 0.0


def test_documented_base_is_the_product() -> None:
    assert base_score("documented", ordinal=12.0, gain=0.1, binary=0.5, sync=0.25, beta=7.0) == 1.5
    assert base_score("documented", ordinal=-4.0, gain=0.1, binary=0.5, sync=1.0, beta=7.0) == -2.0
    assert base_score("documented", ordinal=12.0, gain=0.1, binary=-0.5, sync=1.0, beta=7.0) == 0.0


def test_hardened_base_is_never_negative_and_rises_with_the_rating() -> None:
    ordinals = (-500, -20, 0, 7, 14, 500)
    values = [base_score("hardened", ordinal=o, gain=1.0, binary=1.0, sync=1.0, beta=7.0) for o in ordinals]
    assert values == sorted(values)
    assert min(values) >= 0
    assert values[2:5] == pytest.approx([0.6931472, 1.3132617, 2.1269280])
    assert base_score("hardened", ordinal=0, gain=0.5, binary=1.0, sync=1.0, beta=7.0) == values[2] / 2


@pytest.mark.parametrize(
    ("score", "match", "expected"),
    [
        (0.01, [0.01], 1.0),
        (0.03, [0.01, 0.03, 0.05, 0.05], 1.0),
        (0.015, [0.015, 0.05, 0.05, 0.05], 0.0625),
        (0.015, [0.015, 0.05, 0.05, 50.0], 0.0625),  # one far above all others changes nothing
        (50.0, [0.015, 0.05, 0.05, 50.0], 1.0),
        (0.01, [0.01, -math.inf, -0.1, -math.inf], 1.0),
        (0.0, [0.0, 0.01], 0.0),
        (-0.1, [-0.1, -0.2], 0.0),
    ],
)
def test_gain_is_how_near_a_score_comes_to_the_upper_third(score, match, expected) -> None:
    assert gain(score, match) == pytest.approx(expected)


def test_nobody_gains_less_because_another_one_is_worse() -> None:
    match = [0.01, 0.02, 0.03, 0.04, 0.05]
    for i in range(1, 5):
        for worse in (-math.inf, -1.0, 0.0, 0.015):
            assert gain(0.01, [*match[:i], worse, *match[i + 1 :]]) >= gain(0.01, match)
