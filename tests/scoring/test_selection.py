"""No miner can predict its evaluation, and a peer list holds the best peers."""

import itertools
from collections import Counter

from tplr.scoring.selection import (
    FEWEST_ON_PROBATION,
    MOST_WAITED,
    ChosenPeers,
    earned_peers,
    evaluated_by_loss,
    first_peers,
    next_peers,
    on_probation,
    sample_evaluated,
)
from tplr.scoring.weights import power_normalise


def evaluate_windows(count: int, windows: int, *, per_window: int = 4) -> list[tuple[int, ...]]:
    """Return the evaluated miners of each window."""
    waited, sampled = dict.fromkeys(range(count), MOST_WAITED), []
    for window in range(windows):
        sampled.append(sample_evaluated(waited, count=per_window, seed=1000 + window))
        waited = {uid: 1 if uid in sampled[-1] else waited[uid] + 1 for uid in range(count)}
    return sampled


def test_everybody_has_a_chance_in_every_window() -> None:
    """A miner that was just evaluated also has a chance; one that has waited has a larger chance, and no miner is
    certain."""
    waited = {uid: 1 + uid for uid in range(20)}
    counts = Counter(uid for seed in range(2000) for uid in sample_evaluated(waited, count=4, seed=seed))
    assert 0 < counts[0] < counts[9] < counts[19] < 0.6 * 2000
    assert len(counts) == 20


def test_all_come_about_equally_often_and_nobody_waits_for_long() -> None:
    sampled = evaluate_windows(20, 1000)
    counts = Counter(uid for one in sampled for uid in one)
    assert max(counts.values()) <= 1.2 * min(counts.values())
    gaps = [
        after - before
        for uid in range(20)
        for windows in [[window for window, one in enumerate(sampled) if uid in one]]
        for before, after in itertools.pairwise(windows)
    ]
    assert gaps.count(1) > 0
    assert max(gaps) < 20


def test_one_in_four_of_them_is_evaluated_by_its_loss() -> None:
    for count, expected in ((0, 0), (1, 1), (4, 1), (5, 2), (8, 2)):
        found = evaluated_by_loss(range(count), seed=7)
        assert len(found) == expected
        assert found <= set(range(count))
    assert len({evaluated_by_loss(range(8), seed=seed) for seed in range(40)}) > 10


def test_the_sample_follows_from_the_seed_and_not_from_the_order() -> None:
    waited = {uid: uid for uid in range(12)}
    assert len({sample_evaluated(waited, count=1, seed=seed) for seed in range(60)}) > 8
    backwards = dict(reversed(waited.items()))
    assert all(
        sample_evaluated(waited, count=4, seed=seed) == sample_evaluated(backwards, count=4, seed=seed)
        for seed in range(20)
    )
    assert sample_evaluated({}, count=4, seed=1) == ()
    assert sample_evaluated({7: 1, 3: 9}, count=4, seed=1) == (3, 7)


def test_first_list_by_incentive_then_activity() -> None:
    found = first_peers([5, 4, 3, 2, 1], {2: 0.5, 5: 0.1}, active=[4], at_most=3, reserve=1)
    assert found == ChosenPeers(peers=(2, 4, 5), reserve=(1,), probation=(1, 3))


def test_later_lists_by_weight_with_a_minimum_and_a_maximum() -> None:
    weights = {1: 0.1, 2: 0.6, 3: 0.3}
    assert next_peers([1, 2, 3, 4], weights, at_least=2, at_most=2, reserve=5, seed=1) == ((2, 3), (1, 4), (1, 4))
    assert next_peers([1, 2, 3, 4], weights, at_least=5, at_most=9, reserve=5, seed=1) is None
    # Newcomers: the seed decides, not the uid.
    assert len({next_peers(range(9), {}, at_least=1, at_most=1, reserve=0, seed=seed) for seed in range(40)}) > 5


def earned(active, proven, merit, *, listed=(), at_most=2, reserve=1, seed=1) -> ChosenPeers:
    return earned_peers(active, proven, merit, listed=listed, at_most=at_most, reserve=reserve, seed=seed)


def test_a_place_on_the_list_is_earned() -> None:
    proven = {1: True, 2: True, 3: True, 4: True, 5: False, 6: None}
    merit = {1: 0.1, 2: 0.4, 3: 0.2, 4: 0.3, 5: 0.9, 6: 0.9}
    assert earned(range(1, 8), proven, merit) == ((2, 4), (3,), (1, 3, 5, 6, 7))
    assert earned([1, 5, 6, 7], proven, merit) == ((1,), (), (5, 6, 7))  # never filled up
    assert earned([5, 6, 7], proven, merit) == ((), (), (5, 6, 7))
    assert earned([], proven, merit) == ((), (), ())


def test_who_is_on_the_list_stays_until_it_is_judged() -> None:
    proven = {1: True, 2: None, 3: None, 4: False}
    merit = {1: 0.1, 2: 0.9}
    assert earned([1, 2, 3, 4], proven, merit, listed=(2, 4)) == ((1, 2), (), (3, 4))
    assert earned([2, 3, 4], {}, {}, listed=(2, 3)) == ((2, 3), (), (4,))  # a leader without scores
    assert earned([1, 2, 5], {1: True, 5: True}, {}, listed=(2,)) == ((1, 5), (2,), (2,))  # behind the proven ones
    assert earned([3], {}, {}, listed=(2,)) == ((), (), (3,))  # absent


def test_probation_does_not_grow_with_all_uids_and_everybody_has_a_turn() -> None:
    active = range(256)
    proven = dict.fromkeys(range(23), True) | dict.fromkeys(range(200, 256), False)
    turns = [
        earned_peers(active, proven, {}, listed=(), at_most=20, reserve=3, seed=9, turn=turn) for turn in range(100)
    ]
    assert all(len(one.probation) == 23 and set(one.reserve) <= set(one.probation) for one in turns)
    drawn = Counter(uid for one in turns for uid in set(one.probation) - set(one.reserve))
    assert set(drawn) == set(range(23, 200))  # known zeros only where there is room
    assert max(drawn.values()) < 25
    few = earned_peers(range(40), {}, {}, listed=(), at_most=5, reserve=3, seed=9)
    assert len(few.probation) == FEWEST_ON_PROBATION


def test_of_those_who_wait_known_zeros_come_last() -> None:
    known = dict.fromkeys(range(5), False)
    assert on_probation(range(25), known, at_most=20, turn=4) == tuple(range(5, 25))
    assert len(set(on_probation(range(25), known, at_most=23, turn=4)) & set(range(5))) == 3


def test_the_seed_orders_equal_merits() -> None:
    proven = dict.fromkeys(range(9), True)
    assert len({earned(range(9), proven, {}, at_most=1, seed=seed).peers for seed in range(40)}) > 5


def test_weights_are_powers_that_sum_to_one() -> None:
    weights = power_normalise({3: 2.0, 1: 1.0, 2: 0.0, 4: -5.0}, 2.0)
    assert weights == {1: 0.2, 3: 0.8}
    assert list(weights) == [1, 3]
    assert power_normalise({1: 0.0, 2: -1.0}, 2.0) == {}
