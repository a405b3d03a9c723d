"""Ratings equal those of openskill 6.2.0's PlackettLuce(beta=7, tau=0.1) to the last digits, in any order."""

import itertools

import pytest

from tplr.scoring.documented.rating import Rating, rate

NEW = Rating()
# Ratings before, scores, and what PlackettLuce(beta=7, tau=0.1).rate(...) gave: (mu, sigma).
GOLDEN = [
    (
        [NEW, NEW, NEW, NEW],
        [0.1, 0.5, -2.0, 0.3],
        [
            (24.734103194338065, 8.178196566367324),
            (27.393071250957423, 8.289968889111876),
            (21.543341526394837, 8.178196566367324),
            (26.32948402830968, 8.237559069741343),
        ],
    ),
    (  # a shared rank
        [NEW, NEW, NEW, NEW],
        [4, 3, 3, 1],
        [
            (27.393071250957423, 8.289968889111876),
            (24.734103194338065, 8.237559069741343),
            (24.734103194338065, 8.237559069741343),
            (23.13872236036645, 8.237559069741343),
        ],
    ),
    (
        [Rating(20, 3), Rating(31, 5), Rating(25, 8)],
        [0.1, 0.3, 0.2],
        [
            (19.626832229466693, 2.99722379867526),
            (31.863764604685315, 4.980708370060946),
            (25.440407821995386, 7.7516967373837575),
        ],
    ),
    (
        [Rating(20, 3), Rating(31, 5), Rating(25, 8)],
        [0.1, 0.1, -2],
        [
            (20.156847869626297, 2.9998057978221273),
            (31.064898368833436, 4.980708370060946),
            (23.719601862083255, 7.884913010561623),
        ],
    ),
]


@pytest.mark.parametrize(("before", "scores", "after"), GOLDEN)
def test_golden_values(before, scores, after) -> None:
    found = rate(dict(enumerate(before)), dict(enumerate(scores)), beta=7.0, tau=0.1)
    assert [tuple(found[i]) for i in range(len(before))] == [pytest.approx(one, rel=1e-14) for one in after]


def test_the_order_of_players_changes_no_bit() -> None:
    ratings = {i: Rating(20 + 3.1 * i, 8 - 0.7 * i) for i in range(5)}
    scores = dict(zip(range(5), (0.3, 0.1, 0.3, float("-inf"), 0.2), strict=True))
    results = {
        tuple(sorted(rate(ratings, {i: scores[i] for i in order}, beta=7.0, tau=0.1).items()))
        for order in itertools.permutations(range(5))
    }
    assert len(results) == 1


def test_who_plays_alone_plays_no_match() -> None:
    assert rate({1: NEW}, {1: 0.5}, beta=7.0, tau=0.1) == {1: NEW}
    assert rate({1: NEW}, {}, beta=7.0, tau=0.1) == {}


def test_ordinal() -> None:
    assert NEW.ordinal == 0.0
    assert Rating(20.0, 3.0).ordinal == 11.0
