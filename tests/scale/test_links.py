"""One link: a single flow, equal flows, and conservation of bytes against a simulation in small steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.scale.links import connection_rate, finish_times

INFINITE = float("inf")


def test_one_flow_has_the_link_or_one_connections_rate() -> None:
    assert finish_times([5.0], 100.0, capacity=10.0, connection=20.0) == [15.0]
    assert finish_times([5.0], 100.0, capacity=10.0, connection=2.0) == [55.0]


def test_equal_flows_share_the_link_and_end_together() -> None:
    assert finish_times([0.0] * 20, 50.0, capacity=100.0, connection=100.0) == [10.0] * 20


def test_more_connections_reach_a_plateau() -> None:
    """As PCCL measured over the open Internet (arXiv 2505.14065): the link, not the connections, limits many."""
    seconds = [max(finish_times([0.0] * n, 100.0, capacity=44.0, connection=3.7)) for n in (1, 8, 64)]
    rates = [100.0 * n / time for n, time in zip((1, 8, 64), seconds, strict=True)]
    assert rates == pytest.approx([3.7, 29.6, 44.0])


def test_what_never_begins_never_ends_and_disturbs_nobody() -> None:
    assert finish_times([INFINITE, 1.0], 10.0, capacity=5.0, connection=5.0) == [INFINITE, 3.0]
    assert finish_times([], 10.0, capacity=5.0, connection=5.0) == []


def test_a_later_flow_takes_half_from_the_first() -> None:
    # 5 s alone: 50 of 100; then half each: 10 s more for the first; the second has 50 left, which takes 5 s alone.
    assert finish_times([0.0, 5.0], 100.0, capacity=10.0, connection=10.0) == [15.0, 20.0]


def test_flows_of_different_sizes() -> None:
    # Both have half until the short flow ends; the other flow has 20 of its 30 left, and the whole link.
    assert finish_times([0.0, 0.0], [30.0, 10.0], capacity=10.0, connection=10.0) == [4.0, 2.0]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 30).map(float), min_size=1, max_size=6),
    st.sampled_from([(10.0, 10.0), (10.0, 4.0), (3.0, 10.0)]),
)
def test_equal_to_a_simulation_in_small_steps(starts: list[float], rates: tuple[float, float]) -> None:
    capacity, connection = rates
    found = finish_times(starts, 20.0, capacity=capacity, connection=connection)
    left, now, step, expected = [20.0] * len(starts), 0.0, 0.005, [0.0] * len(starts)
    while any(one > 0 for one in left):
        active = [place for place, start in enumerate(starts) if start <= now + 1e-9 and left[place] > 0]
        for place in active:
            left[place] -= step * min(connection, capacity / len(active))
            if left[place] <= 0:
                expected[place] = now + step
        now += step
    assert found == pytest.approx(expected, abs=0.1)


def test_a_connections_rate_falls_with_latency_and_with_the_root_of_the_loss() -> None:
    base = connection_rate(0.05, 1e-6)
    assert base == pytest.approx(1.22 * 1460 / 5e-5)
    assert connection_rate(0.1, 1e-6) == pytest.approx(base / 2)
    assert connection_rate(0.05, 4e-6) == pytest.approx(base / 2)
