"""Golden values of the documented formulas."""

import pytest

from tplr.schemas import OUT_OF_SYNC, UNREAD
from tplr.scoring.documented.measures import base_score, binary_indicator, moving_average, sync_score


def test_the_indicator_is_plus_or_minus_one(evaluation) -> None:
    assert binary_indicator(evaluation(assigned=0.02, held_out=0.01)) == 1
    assert binary_indicator(evaluation(assigned=0.0, held_out=0.0)) == -1
    assert binary_indicator(evaluation(assigned=0.01, held_out=0.02)) == -1
    assert binary_indicator(evaluation().model_copy(update={"assigned": None})) == -1


def test_moving_average() -> None:
    assert moving_average(0.0, 1.0, 0.05) == pytest.approx(0.05)
    assert moving_average(0.5, -1.0, 0.05) == pytest.approx(0.425)


@pytest.mark.parametrize(
    ("behind", "score"), [(0, 1.0), (1, 0.5724334), (2, 0.2788548), (3, 0.1011929), (5, 0.0), (99, 0.0)]
)
def test_sync_score(behind: int, score: float) -> None:
    assert sync_score(behind) == pytest.approx(score, abs=1e-6)


def test_another_model_is_worth_nothing() -> None:
    assert sync_score(OUT_OF_SYNC) == sync_score(UNREAD) == 0.0


def test_base_is_the_product() -> None:
    assert base_score(ordinal=12.0, binary=0.5, sync=0.25) == 1.5
    assert base_score(ordinal=-4.0, binary=0.5, sync=1.0) == -2.0
    assert base_score(ordinal=12.0, binary=-0.5, sync=1.0) == 0.0
