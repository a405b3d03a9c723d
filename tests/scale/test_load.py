"""A burst of requests on shared processors takes the time of its work, and delays requests that arrive meanwhile."""

import numpy as np
import pytest

from tplr.scale.load import ROUNDS, Burst

INFINITE = float("inf")


def test_many_nodes_share_the_processors_and_few_have_one_each() -> None:
    many = Burst.of(np.full(8, 1.0), np.full(8, 0.5), cores=2.0)
    assert many.done == pytest.approx(np.full(8, 1.0 + 8 * 0.5 / 2))
    two = Burst.of(np.full(2, 1.0), np.full(2, 0.5), cores=2.0)
    assert two.done == pytest.approx([1.5, 1.5])


def test_what_else_runs_takes_its_share() -> None:
    # Three processes on two processors: two thirds each until the nodes are done.
    found = Burst.of(np.zeros(2), np.full(2, 1.0), cores=2.0, others=[(0.0, 5.0)])
    assert found.done == pytest.approx([1.5, 1.5])


def test_a_request_in_a_burst_waits_for_one_round_and_none_after_it() -> None:
    found = Burst.of(np.full(4, 2.0), np.full(4, 1.5), cores=2.0)
    assert (found.begin, found.end) == (2.0, 5.0)
    assert [found.wait(at) for at in (1.9, 2.0, 4.5, 5.0)] == pytest.approx([0.0, 3.0 / ROUNDS, 0.5, 0.0])


def test_nodes_with_processors_of_their_own_delay_nobody() -> None:
    found = Burst.of(np.array([1.0, 2.0]), np.array([0.5, 0.5]), cores=INFINITE)
    assert found.done.tolist() == [1.5, 2.5]
    assert found.wait(1.2) == 0.0


def test_whoever_asks_for_nothing_is_done_at_once() -> None:
    found = Burst.of(np.array([1.0, 2.0]), np.zeros(2), cores=2.0)
    assert found.done.tolist() == [1.0, 2.0]
    assert found.wait(1.5) == 0.0
    assert Burst.of(np.zeros(0), np.zeros(0), cores=2.0).done.tolist() == []
