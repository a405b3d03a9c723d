"""Pauses between two polls: short at first, and never above their share of the elapsed waiting time."""

from tplr.exchange.polling import GROWTH, pause_after


def _looks(until: float, shortest: float) -> list[float]:
    times = [0.0]
    while times[-1] < until:
        times.append(times[-1] + pause_after(times[-1], shortest))
    return times


def test_at_first_every_half_second() -> None:
    assert _looks(3.0, 0.5) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def test_nobody_learns_later_than_a_share_of_the_time_waited() -> None:
    for before, after in zip(_looks(2000.0, 0.5), _looks(2000.0, 0.5)[1:], strict=False):
        assert after - before <= max(0.5, GROWTH * before) + 1e-9


def test_two_minutes_take_few_requests() -> None:
    assert len(_looks(120.0, 0.5)) < 75  # 240 at a constant pause
