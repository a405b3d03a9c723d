"""Scores are never negative, order never matters, and what is saved comes back."""

import itertools
import json
import math

import pytest

from tplr.errors import StateError
from tplr.scoring.board import ScoreBoard
from tplr.scoring.measures import Measurement, binary_indicator, gradient_score
from tplr.scoring.selection import choose_evaluated, choose_peers
from tplr.scoring.weights import power_normalise

HOTKEYS = {1: "a", 2: "b", 3: "c"}


def measured(uid: int, own_after: float, random_after: float) -> Measurement:
    return Measurement(uid=uid, own_before=4.0, own_after=own_after, random_before=5.0, random_after=random_after)


def test_measures() -> None:
    assert gradient_score(measured(1, 3.0, 4.5)) == pytest.approx(0.1)
    assert binary_indicator(measured(1, 3.0, 4.5)) == 1  # 25 % better on its own, 10 % on random pages
    assert binary_indicator(measured(1, 3.6, 4.5)) == -1
    assert gradient_score(measured(1, 3.0, math.nan)) == -1.0
    assert gradient_score(measured(1, 3.0, math.inf)) == -1.0


def test_moving_averages_start_as_a_mean_and_never_go_below_zero() -> None:
    board = ScoreBoard(alpha=0.25)
    for window, after in enumerate((4.5, 4.0, 6.0, 5.0, 4.5)):
        board.record(window, [measured(1, 3.0, after)], HOTKEYS)
    # Scores .1, .2, -.2 (counts as 0), 0, .1: the mean of the first four, then a quarter of the way to the fifth.
    assert board.scores[1] == pytest.approx(0.075 + 0.25 * (0.1 - 0.075))
    assert board.entries[1].evaluations == 5
    assert board.entries[1].last_window == 4
    assert all(score >= 0 for score in board.scores.values())


def test_order_within_a_window_never_matters() -> None:
    window = [measured(1, 3.0, 4.5), measured(2, 3.0, 4.9), measured(3, 4.5, 5.5)]
    states = set()
    for order in itertools.permutations(window):
        board = ScoreBoard(alpha=0.05)
        board.record(1, order, HOTKEYS)
        board.record(2, order, HOTKEYS)
        states.add(json.dumps(board.state_dict()))
    assert len(states) == 1


def test_new_hotkey_inherits_nothing() -> None:
    board = ScoreBoard(alpha=0.05)
    board.record(1, [measured(uid, 3.0, 4.5) for uid in (1, 2)], HOTKEYS)
    board.follow({1: "a", 2: "somebody else"})
    assert list(board.scores) == [1]


def test_state_comes_back_through_json_and_foreign_state_is_refused() -> None:
    board = ScoreBoard(alpha=0.05)
    board.record(1, [measured(uid, 3.0, 4.5) for uid in (2, 1)], HOTKEYS)
    state = json.loads(json.dumps(board.state_dict()))
    other = ScoreBoard(alpha=0.05)
    other.load_state_dict(state)
    assert other.entries == board.entries
    for foreign in ({}, {**state, "version": 2}, {**state, "more": 1}, {"version": 1, "entries": {"1": {"x": 1}}}):
        with pytest.raises(StateError, match="scores: "):
            other.load_state_dict(foreign)
    assert other.entries == board.entries


def test_weights_are_powers_that_sum_to_one() -> None:
    weights = power_normalise({3: 2.0, 1: 1.0, 2: 0.0, 4: -5.0}, 2.0)
    assert weights == {1: pytest.approx(0.2), 3: pytest.approx(0.8)}
    assert list(weights) == [1, 3]
    assert power_normalise({1: 0.0, 2: -1.0}, 2.0) == {}


def test_nobody_is_forgotten() -> None:
    last: dict[int, int] = {}
    for window in range(6):
        chosen = choose_evaluated(range(12), last, 4, seed=window)
        assert len(chosen) == 4
        last.update(dict.fromkeys(chosen, window))
    assert set(last) == set(range(12))
    assert set(last.values()) == {3, 4, 5}
    # Who is first among equals depends on the seed, not on the uid.
    assert len({choose_evaluated(range(12), {}, 1, seed=seed) for seed in range(50)}) > 6


def test_peers_are_the_best_standing_in_uid_order() -> None:
    assert choose_peers([4, 3, 2, 1], {4: 1.0, 2: 3.0}, at_most=3) == (1, 2, 4)
    assert choose_peers([7, 7, 5], {}, at_most=1) == (5,)
