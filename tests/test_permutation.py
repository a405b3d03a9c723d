from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare

from tplr.permutation import MAX_LENGTH, Permutation


@pytest.mark.parametrize("length", [*range(1, 20), 100, 1009, 70_000])
def test_every_index_comes_once_and_both_forms_agree(length):
    permutation = Permutation(length, 7, epoch=3)
    taken = permutation.take(np.arange(length))
    assert np.array_equal(np.sort(taken), np.arange(length))
    places = range(0, length, max(1, length // 50))
    assert [permutation[place] for place in places] == taken[list(places)].tolist()


def test_golden_order():
    """A machine, numpy or Python with another result has another rule."""
    assert [Permutation(10, 42)[i] for i in range(10)] == GOLDEN
    assert Permutation(10**12, 42).take([0, 1, 10**12 - 1]).tolist() == GOLDEN_LARGE


def test_seed_and_epoch_give_other_orders():
    orders = [Permutation(1000, seed, epoch).take(np.arange(1000)) for seed in (1, 2, "1x") for epoch in (0, 1)]
    for i, one in enumerate(orders):
        assert all((one == other).mean() < 0.01 for other in orders[:i])


def test_small_orders_are_alike_likely():
    counts = dict.fromkeys(permutations(range(4)), 0)
    for seed in range(4800):
        counts[tuple(Permutation(4, seed)[i] for i in range(4))] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-4


def test_neighbours_go_apart():
    taken = Permutation(100_000, 5).take(np.arange(100_000))
    table, *_ = np.histogram2d(np.arange(100_000), taken, bins=20)
    assert chisquare(table.ravel()).pvalue > 1e-4
    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.02


def test_the_largest_length_and_shapes():
    huge = Permutation(MAX_LENGTH, 1)
    assert huge.take([[0, MAX_LENGTH - 1]]).tolist() == [[huge[0], huge[-1]]]
    assert Permutation(0, 1).take([]).shape == (0,)


def test_integers_of_numpy():
    huge, ints = Permutation(np.int64(10**12), 7), Permutation(10**12, 7)
    assert [huge[np.int64(place)] for place in (0, 5, -1)] == [ints[place] for place in (0, 5, -1)]
    assert huge.take([0, 5]).tolist() == ints.take([0, 5]).tolist()


def test_refusals():
    with pytest.raises(ValueError, match="2\\*\\*62"):
        Permutation(MAX_LENGTH + 1, 1)
    for places in ([3], [-1], [0, 5]):
        with pytest.raises(IndexError):
            Permutation(3, 1).take(places)
    with pytest.raises(IndexError):
        Permutation(3, 1)[3]
    with pytest.raises(IndexError):
        Permutation(0, 1)[0]


GOLDEN = [7, 8, 9, 0, 2, 6, 1, 3, 5, 4]
GOLDEN_LARGE = [592602067161, 745855303354, 746059476146]
