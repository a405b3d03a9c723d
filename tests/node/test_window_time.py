"""Phases of a window sum to the elapsed time, also when one interrupts another."""

import pytest

from tplr.node.window_time import PHASES, ModelSpeed, WindowTime


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def fail(self) -> None:
        self.now += 1
        raise KeyError


def test_phases_sum_to_the_time_that_passed() -> None:
    clock = Clock()
    times = WindowTime(clock)
    clock.now += 1
    with times.phase("other"):
        clock.now += 2
        with times.phase("applying"):
            clock.now += 4
            with times.phase("saving"):
                clock.now += 8
            clock.now += 16
    seconds = times.take()
    assert seconds == dict.fromkeys(PHASES, 0.0) | {"waiting_for_end": 1, "other": 2, "applying": 20, "saving": 8}
    clock.now += 3
    assert times.take() == dict.fromkeys(PHASES, 0.0) | {"waiting_for_end": 3}


def test_a_phase_that_fails_ends() -> None:
    clock = Clock()
    times = WindowTime(clock)
    with pytest.raises(KeyError), times.phase("training"):
        clock.fail()
    clock.now += 2
    seconds = times.take()
    assert (seconds["training"], seconds["waiting_for_end"]) == (1, 2)


@pytest.mark.parametrize(("moved", "left"), [(2, 3), (9, 0), (-1, 5)])
def test_a_part_of_a_phase_can_turn_out_to_be_another(moved: float, left: float) -> None:
    clock = Clock()
    times = WindowTime(clock)
    with times.phase("gathering"):
        clock.now += 5
        times.move("gathering", "waiting_for_bound", moved)
    seconds = times.take()
    assert (seconds["gathering"], seconds["waiting_for_bound"]) == (left, 5 - left)


def test_model_flops_utilisation() -> None:
    assert ModelSpeed(7.64e9, 989.5e12).utilisation(64_760) == pytest.approx(0.5, rel=1e-3)
    assert ModelSpeed(7.64e9, None).utilisation(64_760) is None
