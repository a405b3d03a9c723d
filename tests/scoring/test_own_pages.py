"""Miners that trained on the pages stand out: updates with and without a part of the pages' own gradient."""

import math

import numpy as np
import pytest

from tplr.schemas import published
from tplr.scoring import own_pages
from tplr.scoring.credit import gram_of
from tplr.scoring.own_pages import FEWEST_OTHERS, deviations, indicator
from tplr.training.alignment import Alignment

ENTRIES = 20_000
TESTED = 5


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def crowded(seed: int) -> tuple[dict[int, tuple[float, ...]], Alignment]:
    """Return products and alignment of 8 miners and of 12 newcomers, which trained on the pages of uid 5 as it did."""
    random = np.random.default_rng(seed)
    truth, special = unit(random.standard_normal(ENTRIES)), unit(random.standard_normal(ENTRIES))

    def update(*, trained: bool) -> np.ndarray:
        return 0.6 * truth + 0.2 * trained * special + 0.8 * unit(random.standard_normal(ENTRIES))

    updates = np.stack(
        [*(update(trained=uid == TESTED) for uid in range(8)), *(update(trained=True) for _ in range(12))]
    )
    pages, elsewhere, held_out = (
        0.5 * truth + math.sqrt(0.75) * unit(0.3 * own + unit(random.standard_normal(ENTRIES)))
        for own in (special, 0 * special, 0 * special)
    )
    tests = {TESTED: tuple(updates @ pages), 0: tuple(updates @ elsewhere)}
    gram, norms = (updates @ updates.T)[np.triu_indices(20)], np.linalg.norm(updates, axis=1)
    return tests, Alignment(tuple(range(20)), tuple(updates @ held_out), tuple(norms), tuple(gram))


def only(
    rows: range, tests: dict[int, tuple[float, ...]], alignment: Alignment
) -> tuple[dict[int, tuple[float, ...]], Alignment]:
    """Return the products and the alignment of these updates alone."""
    square = gram_of(alignment)[np.ix_(rows, rows)]
    some = Alignment(
        tuple(alignment.uids[i] for i in rows),
        tuple(alignment.products[i] for i in rows),
        tuple(alignment.norms[i] for i in rows),
        tuple(square[np.triu_indices(len(rows))]),
    )
    return {uid: tuple(one[i] for i in rows) for uid, one in tests.items()}, some


def many(count: int, *, trained: bool, copier: float = 0.0, tested: int = 1) -> list[float]:
    """Return the deviations of uid 5 on its own pages among ``count`` miners, with sixty seeds."""
    return [ahead(*seen(count, trained=trained, seed=seed, copier=copier, tested=tested)) for seed in range(60)]


def ahead(tests: dict[int, tuple[float, ...]], alignment: Alignment) -> float:
    return deviations(tests, alignment, ())[TESTED, TESTED]


def seen(
    count: int, *, trained: bool, seed: int, copier: float = 0.0, tested: int = 1
) -> tuple[dict[int, tuple[float, ...]], Alignment]:
    """Return products with the gradients on the pages of uid 5, on those of other miners, and on held-out pages."""
    random = np.random.default_rng(seed)
    truth = unit(random.standard_normal(ENTRIES))
    noise = [unit(random.standard_normal(ENTRIES)) for _ in range(count + 1)]
    updates = np.stack([random.uniform(0.5, 2.0) * (0.6 * truth + 0.8 * one) for one in noise[:count]])
    if copier:
        updates[0] = copier * updates[TESTED] + math.sqrt(1 - copier**2) * unit(random.standard_normal(ENTRIES))
    pages = 0.5 * truth + math.sqrt(0.75) * unit(0.2 * noise[TESTED] * trained + noise[-1])
    elsewhere = [0.5 * truth + math.sqrt(0.75) * unit(random.standard_normal(ENTRIES)) for _ in range(tested)]
    upper = np.triu_indices(count)
    gram, norms = (updates @ updates.T)[upper], np.linalg.norm(updates, axis=1)
    alignment = Alignment(tuple(range(count)), tuple(updates @ elsewhere[0]), tuple(norms), tuple(gram))
    tests = {TESTED: tuple(updates @ pages)}
    tests |= {uid: tuple(updates @ one) for uid, one in zip(range(TESTED), elsewhere[1:], strict=False)}
    return tests, alignment


def test_the_prediction_is_that_of_the_formula() -> None:
    """With the inverse matrix of the others, as in the module's text."""
    random = np.random.default_rng(3)
    vectors = random.standard_normal((12, 30))
    cosines = vectors @ vectors.T / np.outer(*[np.linalg.norm(vectors, axis=1)] * 2)
    ridged, rest = cosines + own_pages.RIDGE * np.eye(12), random.standard_normal(12)
    for left_out in ([5], [5, 2], [0, 5, 7, 11]):
        others = np.setdiff1d(np.arange(12), left_out)
        of_others = np.linalg.inv(ridged[np.ix_(others, others)])
        expected = ridged[5, others] @ of_others @ rest[others]
        variance = ridged[5, 5] - ridged[5, others] @ of_others @ ridged[others, 5]
        residuals = of_others @ rest[others] / np.sqrt(np.diag(of_others))
        spread = own_pages.NORMAL * np.median(np.abs(residuals)) * np.sqrt(variance)
        found = own_pages._ahead(rest, 5, np.isin(np.arange(12), others), cosines, np.linalg.inv(ridged))
        assert found == pytest.approx((rest[5] - expected) / spread)


def test_of_one_update_no_other_is_compared(monkeypatch) -> None:
    """Explaining each of 256 miners does not compare all updates 256 times."""
    compared: list[int] = []
    ahead_of_others = own_pages._ahead

    def count(rest: np.ndarray, mine: int, *more: np.ndarray) -> float:
        compared.append(mine)
        return ahead_of_others(rest, mine, *more)

    monkeypatch.setattr(own_pages, "_ahead", count)
    tests, alignment = seen(12, trained=True, seed=1, tested=3)
    everybody = deviations(tests, alignment, ())
    compared.clear()
    assert deviations(tests, alignment, (), only=TESTED) == {one: x for one, x in everybody.items() if one[0] == TESTED}
    assert compared == [TESTED] * len(tests)


@pytest.mark.parametrize("count", [6, 12, pytest.param(30, marks=pytest.mark.long)])
def test_training_on_the_pages_shows_and_nothing_else_does(count):
    honest, other = many(count, trained=True), many(count, trained=False)
    assert np.median(honest) > 3
    assert abs(np.median(other)) < 0.5
    assert np.median(np.abs(other)) < 2


def test_tests_of_others_take_chance_away():
    """A held-out gradient is as noisy as that on the pages; the mean with those on others' pages is less noisy."""
    alone, several = many(12, trained=True), many(12, trained=True, tested=5)
    assert np.median(several) > 1.15 * np.median(alone)


def test_a_copier_among_the_others_does_not_hide_it():
    assert np.median(many(12, trained=True, copier=0.8)) > 0.9 * np.median(many(12, trained=True))


def test_newcomers_that_train_on_a_miners_pages_do_not_hide_its_training():
    hidden, seen_by_included = [], []
    for seed in range(8):
        tests, alignment = crowded(seed)
        everybody = deviations(tests, alignment, ())
        hidden.append(everybody[TESTED, TESTED] - everybody[TESTED, 0])
        known = deviations(tests, alignment, range(8))
        seen_by_included.append(known[TESTED, TESTED] - known[TESTED, 0])
    assert np.median(seen_by_included) > 2
    assert np.median(hidden) < np.median(seen_by_included) / 2, "without the rule they would hide it"


def test_newcomers_change_no_test_of_an_included_miner():
    tests, alignment = crowded(0)
    among_included = deviations(*only(range(8), tests, alignment), range(8))
    with_newcomers = deviations(tests, alignment, range(8))
    of_included = {one: found for one, found in with_newcomers.items() if one[0] < 8}
    assert of_included == pytest.approx(among_included)
    assert {uid for uid, _ in with_newcomers} == set(range(20)), "newcomers are compared with the included ones"


def test_each_newcomer_is_compared_with_the_included_ones_alone():
    tests, alignment = crowded(0)
    among_nine = deviations(*only(range(9), tests, alignment), range(8))
    with_others = deviations(tests, alignment, range(8))
    assert {page: with_others[8, page] for page in tests} == pytest.approx(
        {page: among_nine[8, page] for page in tests}
    )


def test_if_too_few_are_included_they_are_not_tested_and_newcomers_are_compared_with_all():
    tests, alignment = crowded(0)
    everybody = deviations(tests, alignment, ())
    found = deviations(tests, alignment, range(FEWEST_OTHERS))
    assert found == {one: value for one, value in everybody.items() if one[0] >= FEWEST_OTHERS}


def test_a_factor_in_common_changes_nothing():
    tests, alignment = seen(12, trained=False, seed=1)
    found = ahead(tests, alignment)
    scaled = alignment._replace(products=tuple(3 * one for one in alignment.products))
    assert ahead({TESTED: tuple(0.1 * one for one in tests[TESTED])}, scaled) == pytest.approx(found)


def test_the_indicator_compares_own_pages_with_those_of_others():
    assert indicator(2.0, [1.0, -1.0, 0.0, 3.0]) == 0.5
    assert indicator(2.0, [2.0]) == 0.0
    assert indicator(9.0, [1.0, 2.0]) == 1.0 == -indicator(-9.0, [1.0, 2.0])


def test_too_few_others_tell_nothing():
    tests, alignment = seen(TESTED + 1, trained=True, seed=0)
    few = range(TESTED + 1 - FEWEST_OTHERS, TESTED + 1)
    assert deviations(*only(few, tests, alignment), ()) == {}
    assert deviations({}, alignment, ()) == {}
    assert {uid for uid, _ in deviations({99: tests[TESTED]}, alignment, ())} == set(alignment.uids)


def test_updates_without_length_are_no_others():
    silent = Alignment(tuple(range(12)), (0.0,) * 12, (0.0,) * 12, (0.0,) * 78)
    assert deviations({TESTED: (0.0,) * 12}, silent, ()) == {}


def test_steps_that_are_too_short_for_the_published_digits_are_left_out() -> None:
    """Their ``<d, d>`` is rounded, and their products with others are not: correlations would come out above 1."""
    random = np.random.default_rng(5)
    steps = random.standard_normal((8, 400))
    steps /= np.linalg.norm(steps, axis=1)[:, None]
    towards = steps.sum(axis=0) / np.linalg.norm(steps.sum(axis=0))
    own = towards + 0.5 * steps[0] + 0.03 * random.standard_normal(400)

    def tested(some: np.ndarray) -> float:
        gram = (some @ some.T)[np.triu_indices(len(some))]
        uids = tuple(range(len(some)))
        products = published((some @ towards).tolist())
        found = Alignment(uids=uids, products=products, norms=(1.0,) * len(uids), gram=published(gram.tolist()))
        return deviations({0: published((some @ own).tolist())}, found, ())[0, 0]

    short = 1e-3 * np.tile(towards, (3, 1))
    assert tested(np.concatenate([steps, short])) == tested(steps)
