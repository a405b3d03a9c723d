import copy
import pickle
from fractions import Fraction
from itertools import count, islice

import pytest

from tplr.errors import StateError
from tplr.permutation import Permutation
from tplr.streams.order import Order
from tplr.streams.round_robin import WeightedRoundRobin

TEN = Order.of(range(100, 110), "tens")


def bumped(item):
    item["id"] += 1
    return item


@pytest.mark.parametrize(
    ("order", "items"),
    [
        (TEN, list(range(100, 110))),
        (TEN.map(str), [str(i) for i in range(100, 110)]),
        (Order.of([{"id": 1}]).map(bumped).repeat().take(2), [{"id": 2}] * 2),
        (TEN.permute(3, 1), [100 + i for i in Permutation(10, 3, 1)]),
        (TEN.take(3), [100, 101, 102]),
        (TEN.take(30), list(range(100, 110))),
        (TEN.stride(4, 1), [101, 105, 109]),
        (TEN.stride(4, 2), [102, 106]),
        (TEN.stride(20, 12), []),
        (TEN.share(1, 4), [101, 105]),
        (TEN.share(1, 4).stride(2, 1), [105]),
        (TEN.repeat().take(23), [*range(100, 110)] * 2 + [100, 101, 102]),
        (TEN.repeat(7).take(20), [100 + Permutation(10, 7, epoch)[i] for epoch in (0, 1) for i in range(10)]),
        (Order.mix([TEN, Order.of("abc")], [1.5, 1]), [100, "a", 101, "b", 102, 103, "c", 104]),
        (Order.mix([TEN, Order.of("abc")], [1, 0]), list(range(100, 110))),
    ],
)
def test_orders_by_place_and_as_flows_from_any_place(order, items):
    order = pickle.loads(pickle.dumps(order))  # as in a spawned worker
    assert len(order) == len(items)
    assert list(order) == [order[i] for i in range(len(items))] == items
    with pytest.raises(IndexError):
        order[len(items)]
    if items:
        assert order[-1] == items[-1]
    iterator = order.iter()
    for taken in range(len(items) + 1):
        state = iterator.state()
        before = copy.deepcopy(state)
        assert [list(order.iter(state)) for _ in range(2)] == [items[taken:]] * 2
        assert state == before
        assert next(iterator, None) == (items[taken] if taken < len(items) else None)


def test_an_endless_order():
    endless = TEN.repeat(seed=1)
    assert endless[10**15] == 100 + Permutation(10, 1, 10**14)[0]
    assert next(endless.iter({"consumed": 10**15})) == endless[10**15]
    with pytest.raises(TypeError, match="is infinite"):
        len(endless)
    assert Order.mix([endless, endless], [1, 2]).length is None
    with pytest.raises(ValueError, match="is empty"):
        Order.of([]).repeat()


@pytest.mark.parametrize("world", range(1, 6))
def test_shares_resume_under_another_number_of_ranks_or_refuse(world):
    order = Order.of(range(60)).permute(1)
    iterators = [order.share(rank, world).map(lambda item: item).iter() for rank in range(world)]
    seen = {next(iterator) for _ in range(60 // world // 2) for iterator in iterators}
    state = iterators[0].state()
    assert all(iterator.state() == state for iterator in iterators)
    for other in range(1, 8):
        if state["consumed"] % other:
            with pytest.raises(StateError, match="can't be divided among"):
                order.share(0, other).iter(state)
            continue
        rest = [item for rank in range(other) for item in order.share(rank, other).iter(state)]
        assert len(rest) == len(set(rest)) == (60 - len(seen)) // other * other
        assert not seen & set(rest)


def test_names_tell_orders_apart():
    names = [order.name for order in (TEN, TEN.permute(1), TEN.permute("1"), TEN.share(0, 2).take(1), TEN.take(1))]
    assert len(set(names)) == len(names)
    assert TEN.share(0, 2).name == TEN.share(1, 4).name  # states are interchangeable
    assert TEN.share(0, 2).permute(1).name != TEN.share(1, 2).permute(1).name


@pytest.mark.parametrize("weights", [[1.5, 1], [0.5, 0.3, 0.2], [1, 1, 1], [0.001, 0.999], [7, 0, 1, 2.25]])
def test_credits_keep_every_share_within_one_item_and_begin_again(weights):
    schedule, total = WeightedRoundRobin(weights), sum(Fraction(str(weight)) for weight in weights)
    counts, turns = [0] * len(weights), []
    for turn in range(1, 2 * schedule.period + 1):
        turns.append(schedule.next())
        counts[turns[-1]] += 1
        for weight, taken in zip(weights, counts, strict=True):
            assert abs(taken - turn * Fraction(str(weight)) / total) < 1
    assert turns[: schedule.period] == turns[schedule.period :]


def test_credits_of_the_documented_interface():
    """Golden orders of the documented interface."""
    assert [WeightedRoundRobin([1.5, 1]).next() for _ in range(1)] == [0]
    for weights, pattern in (([1.5, 1], "0101001010"), ([0.5, 0.3, 0.2], "0120010210")):
        schedule = WeightedRoundRobin(weights)
        assert "".join(str(schedule.next()) for _ in pattern) == pattern


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [float("inf"), 1]])
def test_refused_weights(weights):
    with pytest.raises(ValueError, match="weights"):
        WeightedRoundRobin(weights)


def test_a_mix_needs_a_period_that_fits():
    with pytest.raises(ValueError, match="fewer digits"):
        Order.mix([TEN, TEN], [1 / 3, 1 / 2])
    schedule = WeightedRoundRobin([1 / 3, 2 / 3])
    assert sum(islice((schedule.next() for _ in count()), 3000)) == 2000
