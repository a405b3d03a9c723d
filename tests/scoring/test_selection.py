"""Nobody is forgotten, like meets like, and a peer list holds the best."""

from collections import Counter

from tplr.scoring.selection import ChosenPeers, choose_evaluated, evaluation_bins, first_peers, next_peers
from tplr.scoring.weights import power_normalise


def evaluate_windows(count: int, windows: int, *, per_window: int = 4, bins: int = 5) -> list[tuple[int, ...]]:
    """Who is evaluated in each window, if each miner's score is its uid."""
    waiting, chosen = dict.fromkeys(range(count), 1), []
    for window in range(windows):
        chosen.append(
            choose_evaluated(
                range(count),
                {uid: float(uid) for uid in range(count)},
                waiting,
                window=window,
                count=per_window,
                bins=bins,
                seed=1000 + window,
            )
        )
        waiting = {uid: 1 if uid in chosen[-1] else waiting[uid] + 1 for uid in range(count)}
    return chosen


def test_nobody_waits_longer_than_two_rounds_and_a_bit() -> None:
    for count in (3, 12, 40, 100):
        round_windows = -(-count // 4) + 5
        chosen = evaluate_windows(count, 4 * round_windows)
        for start in range(len(chosen) - 3 * round_windows + 1):
            assert {uid for one in chosen[start : start + 3 * round_windows] for uid in one} == set(range(count))


def test_all_come_about_equally_often() -> None:
    counts = Counter(uid for one in evaluate_windows(40, 400) for uid in one)
    assert max(counts.values()) <= 2 * min(counts.values())


def test_bins_hold_miners_of_like_score() -> None:
    assert evaluation_bins(range(25), {uid: float(uid) for uid in range(25)}, 5)[0] == (24, 23, 22, 21, 20)
    assert [len(one) for one in evaluation_bins(range(23), {}, 5)] == [4, 5, 4, 5, 5]
    assert evaluation_bins(range(19), {}, 5) == [tuple(range(19))]  # too few for bins
    assert evaluation_bins([], {}, 5) == []
    for one in evaluate_windows(25, 5):
        assert len({uid // 5 for uid in one}) == 1


def test_the_choice_is_the_seed_s() -> None:
    drawn = {choose_evaluated(range(12), {}, {}, window=0, count=1, bins=5, seed=seed) for seed in range(60)}
    assert len(drawn) > 8
    assert choose_evaluated([], {}, {}, window=0, count=4, bins=5, seed=1) == ()
    assert choose_evaluated([7, 3], {}, {}, window=3, count=4, bins=5, seed=1) == (3, 7)


def test_first_list_by_incentive_then_activity() -> None:
    found = first_peers([5, 4, 3, 2, 1], {2: 0.5, 5: 0.1}, active=[4], at_most=3, reserve=1)
    assert found == ChosenPeers(peers=(2, 4, 5), reserve=(1,))


def test_later_lists_by_weight_with_a_minimum_and_a_maximum() -> None:
    weights = {1: 0.1, 2: 0.6, 3: 0.3}
    assert next_peers([1, 2, 3, 4], weights, at_least=2, at_most=2, reserve=5, seed=1) == ((2, 3), (1, 4))
    assert next_peers([1, 2, 3, 4], weights, at_least=5, at_most=9, reserve=5, seed=1) is None
    # Newcomers: the seed decides, not the uid.
    assert len({next_peers(range(9), {}, at_least=1, at_most=1, reserve=0, seed=seed) for seed in range(40)}) > 5


def test_weights_are_powers_that_sum_to_one() -> None:
    weights = power_normalise({3: 2.0, 1: 1.0, 2: 0.0, 4: -5.0}, 2.0)
    assert weights == {1: 0.2, 3: 0.8}
    assert list(weights) == [1, 3]
    assert power_normalise({1: 0.0, 2: -1.0}, 2.0) == {}
