"""Catching up: the formula against stepping through time, and the rule for using a checkpoint."""

import math

import pytest

from tplr.scale.newcomer import CatchUp, catch_up
from tplr.scale.sizes import run_constants

HPARAMS = run_constants("1B", max_topk_peers=10, checkpoint_frequency=100)


def run(behind: int, *, rate: float = 10.0, age: int | None = 30, apply: float = 1.0) -> CatchUp:
    return catch_up(
        HPARAMS,
        behind=behind,
        checkpoint=2000.0,
        update=20.0,
        rate=rate,
        window_seconds=100.0,
        apply=apply,
        checkpoint_age=age,
    )


def stepped(missing: float, each: float, began: float) -> float:
    now, applied = began, 0
    while applied < missing + now / 100.0:
        now, applied = now + each, applied + 1
    return now


def test_a_newcomer_takes_the_checkpoint_and_then_each_window() -> None:
    found = run(1000)
    assert found.restored == 200.0
    assert found.seconds == pytest.approx(stepped(30, 20.0, 200.0), abs=40)
    assert found.fetched == pytest.approx(2000 + found.windows * 200)


def test_whoever_was_away_for_less_than_the_frequency_takes_none() -> None:
    found = run(20)
    assert found.restored == 0.0
    assert found.seconds == pytest.approx(stepped(20, 20.0, 0.0), abs=40)


def test_a_link_that_takes_longer_than_a_window_for_a_window_never_catches_up() -> None:
    assert math.isinf(run(1, rate=2.0).seconds)
    assert math.isinf(run(1, apply=100.0).seconds)
    assert not math.isinf(run(1, rate=2.1).seconds)
