"""Every peer is selected eventually, and peers of similar rating are compared."""

from collections import Counter

from tplr.scoring.documented.selection import choose_evaluated, evaluation_bins


def evaluate_windows(count: int, windows: int, *, per_window: int = 4, bins: int = 5) -> list[tuple[int, ...]]:
    """Return the evaluated miners of each window, if each miner's score is its uid."""
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


def test_the_choice_follows_from_the_seed() -> None:
    drawn = {choose_evaluated(range(12), {}, {}, window=0, count=1, bins=5, seed=seed) for seed in range(60)}
    assert len(drawn) > 8
    assert choose_evaluated([], {}, {}, window=0, count=4, bins=5, seed=1) == ()
    assert choose_evaluated([7, 3], {}, {}, window=3, count=4, bins=5, seed=1) == (3, 7)
