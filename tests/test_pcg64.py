"""The stream equals numpy's, which only this test uses as reference; picking is checked for fairness."""

import random

import numpy as np
import pytest

from tplr.pcg64 import PCG64Stream

SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**128 - 1, 2**128, 2**200 + 12345]
# Around 2**32, where 64-bit words begin; 2**31 + 1 is the span that draws again most often.
SPANS = [1, 2, 3, 104, 4899, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 7, 2**62 + 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_integers_equal_numpys(seed):
    ours, numpys = PCG64Stream(seed), np.random.default_rng(seed)
    order = random.Random(seed)
    for _ in range(400):
        span, low = order.choice(SPANS), order.choice([0, 1, -5])
        assert ours.integers(low, low + span) == numpys.integers(low, low + span)


@pytest.mark.parametrize("words", [0, 1, 5, 6_000, 2**40 + 3, 2**100 + 1])
def test_advance_equals_numpys_and_forgets_half_words(words):
    ours, numpys = PCG64Stream(7), np.random.default_rng(7)
    ours.integers(0, 10), numpys.integers(0, 10)  # leaves half a word behind
    ours.advance(words)
    numpys.bit_generator.advance(words)
    assert [ours.integers(0, 1000) for _ in range(9)] == [numpys.integers(0, 1000) for _ in range(9)]


def test_choice_and_floats_equal_numpys():
    ours, numpys = PCG64Stream(3), np.random.default_rng(3)
    names = ["a", "b", "c"]
    for _ in range(50):
        assert ours.choice(names) == numpys.choice(names)
        assert ours.random() == numpys.random()


def test_stream_does_not_change():
    draw = PCG64Stream(42)
    assert [draw.random() for _ in range(3)] == [0.7739560485559633, 0.4388784397520523, 0.8585979199113825]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 4), (0, 2**64 + 1)])
def test_an_empty_or_oversized_range_is_refused(low, high):
    with pytest.raises(ValueError, match="expected 1 to"):
        PCG64Stream(0).integers(low, high)


def test_negative_seeds_are_refused():
    with pytest.raises(ValueError, match="not negative"):
        PCG64Stream(-1)


def test_weighted_sample_follows_weights_and_skips_zeros():
    first = [PCG64Stream(seed).weighted_sample("abc", [1.0, 0.0, 3.0], 2) for seed in range(2000)]
    assert all(sorted(picked) == ["a", "c"] for picked in first)
    assert 1400 < sum(picked[0] == "c" for picked in first) < 1600
