"""Golden values of every formula, and the distinction of signal from chance."""

import numpy as np
import pytest

from tplr.schemas import Evaluation
from tplr.scoring.measures import (
    LOSS_HIGH,
    LOSS_LOW,
    LOSS_SPREAD,
    OWN_PAGES_HIGH,
    OWN_PAGES_LOW,
    SIGNIFICANT,
    loss_indicator,
    measured_gain,
    own_pages_factor,
)


def test_measured_gain_is_the_relative_improvement_on_held_out_pages(evaluation) -> None:
    assert measured_gain(evaluation(held_out=0.1)) == pytest.approx(0.1)
    assert measured_gain(evaluation(held_out=-0.3)) == pytest.approx(-0.3)
    assert measured_gain(diverged(evaluation(), "held_out")) == -1.0
    assert measured_gain(evaluation(held_out=-50.0)) == -1.0  # no gain is worse than a loss that is not finite


def diverged(measured: Evaluation, pages: str) -> Evaluation:
    return measured.model_copy(update={pages: getattr(measured, pages).model_copy(update={"after": None})})


def test_loss_indicator_counts_as_far_as_it_is_told_from_chance(evaluation) -> None:
    def indicator(measured: Evaluation) -> float:
        assert measured.assigned is not None
        return loss_indicator(measured.assigned, measured.held_out)

    # Improvements of 2 % of 4 and 1 % of 5 nats: with an error of .01 nats on each side they differ by 3.1 errors.
    assert indicator(evaluation(assigned=0.02, held_out=0.01, error=0.010)) == 1
    assert indicator(evaluation(assigned=0.02, held_out=0.01, error=0.020)) == pytest.approx(0.7808688)
    assert indicator(evaluation(assigned=0.01, held_out=0.02, error=0.020)) == pytest.approx(-0.7808688)
    assert indicator(evaluation(error=1e9)) == pytest.approx(0.0, abs=1e-9)
    assert indicator(evaluation(assigned=0.01, held_out=0.02, error=0.010)) == -1
    assert indicator(evaluation(assigned=0.0, held_out=0.0, error=0.0)) == 0
    assert indicator(evaluation(assigned=0.1, held_out=0.0, error=0.0)) == 1
    assert indicator(diverged(evaluation(), "assigned")) == -1
    assert indicator(diverged(evaluation(), "held_out")) == -1


def test_own_pages_factor() -> None:
    assert own_pages_factor([]) == 0.0
    assert own_pages_factor([OWN_PAGES_LOW, 0.0]) == 0.0
    assert own_pages_factor([1.0, OWN_PAGES_HIGH]) == 1.0
    middle = (OWN_PAGES_LOW + OWN_PAGES_HIGH) / 2
    assert own_pages_factor([middle - 0.1, middle + 0.1]) == pytest.approx(0.5)
    assert own_pages_factor([0.0], [1.0]) == 0.0


def test_own_pages_by_loss_cost_only_what_is_below_zero_beyond_chance() -> None:
    assert own_pages_factor([], [LOSS_LOW]) == own_pages_factor([], [LOSS_HIGH]) == 1.0
    middle = (LOSS_LOW + LOSS_HIGH) / 2
    assert own_pages_factor([], [middle - SIGNIFICANT * LOSS_SPREAD / 10] * 100) == pytest.approx(0.5)
    assert own_pages_factor([], [-1.0] * 8) == own_pages_factor([], [-0.6] * 16) == 0.0
    # Nine of ten honest miners keep all of it if the easier set of pages decides each test.
    random = np.random.default_rng(0)
    factors = [own_pages_factor([], random.choice([-1.0, 1.0], 8).tolist()) for _ in range(1000)]
    assert np.mean(np.array(factors) == 1.0) > 0.9
    assert np.mean(np.array(factors) == 0.0) < 0.05
