"""Who trained on the pages stands out: updates with a part of the pages' own gradient, and those without."""

import math

import numpy as np
import pytest

from tplr.schemas import published
from tplr.scoring.own_pages import FEWEST_OTHERS, indicator
from tplr.training.alignment import Alignment

ENTRIES = 20_000
TESTED = 5


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def many(count: int, *, trained: bool, copier: float = 0.0) -> list[float | None]:
    """The test of uid 5 among ``count`` miners, with sixty seeds."""
    return [indicator(*seen(count, trained=trained, seed=seed, copier=copier)) for seed in range(60)]


def seen(count: int, *, trained: bool, seed: int, copier: float = 0.0) -> tuple[int, tuple[float, ...], Alignment]:
    random = np.random.default_rng(seed)
    truth = unit(random.standard_normal(ENTRIES))
    noise = [unit(random.standard_normal(ENTRIES)) for _ in range(count + 1)]
    updates = np.stack([random.uniform(0.5, 2.0) * (0.6 * truth + 0.8 * one) for one in noise[:count]])
    if copier:
        updates[0] = copier * updates[TESTED] + math.sqrt(1 - copier**2) * unit(random.standard_normal(ENTRIES))
    pages = 0.5 * truth + math.sqrt(0.75) * unit(0.2 * noise[TESTED] * trained + noise[-1])
    held_out = 0.5 * truth + math.sqrt(0.75) * unit(random.standard_normal(ENTRIES))
    upper = np.triu_indices(count)
    gram, norms = (updates @ updates.T)[upper], np.linalg.norm(updates, axis=1)
    alignment = Alignment(tuple(range(count)), tuple(updates @ held_out), tuple(norms), tuple(gram))
    return TESTED, tuple(updates @ pages), alignment


@pytest.mark.parametrize("count", [6, 12, 30])
def test_training_on_the_pages_shows_and_nothing_else_does(count):
    honest, other = many(count, trained=True), many(count, trained=False)
    assert np.mean(honest) > (0.6 if count == 6 else 0.85)
    assert abs(np.mean(other)) < 0.25
    assert all(-1 <= one <= 1 for one in honest + other)


def test_a_copier_among_the_others_does_not_hide_it():
    assert np.mean(many(12, trained=True, copier=0.8)) > np.mean(many(12, trained=True)) - 0.1


def test_a_factor_in_common_changes_nothing():
    uid, products, alignment = seen(12, trained=False, seed=1)
    found = indicator(uid, products, alignment)
    assert -1 < found < 1
    scaled = alignment._replace(products=tuple(3 * one for one in alignment.products))
    assert indicator(uid, tuple(0.1 * one for one in products), scaled) == pytest.approx(found)


def test_too_few_others_tell_nothing():
    uid, products, alignment = seen(TESTED + 1, trained=True, seed=0)
    keep = FEWEST_OTHERS
    first = np.arange(TESTED + 1)[-keep:]
    square = np.zeros((TESTED + 1,) * 2)
    square[np.triu_indices(TESTED + 1)] = alignment.gram
    square += np.triu(square, 1).T
    some = Alignment(
        tuple(first.tolist()),
        tuple(alignment.products[i] for i in first),
        tuple(alignment.norms[i] for i in first),
        tuple(square[np.ix_(first, first)][np.triu_indices(keep)]),
    )
    assert indicator(uid, [products[i] for i in first], some) is None
    assert indicator(99, products, alignment) is None


def test_updates_without_length_are_no_others():
    uid, _, alignment = seen(12, trained=True, seed=0)
    silent = Alignment(alignment.uids, (0.0,) * 12, (0.0,) * 12, (0.0,) * 78)
    assert indicator(uid, [0.0] * 12, silent) is None


def test_steps_that_are_too_short_for_the_published_digits_are_left_out() -> None:
    """Their ``<d, d>`` is rounded, and their products with others are not: correlations would come out above 1."""
    random = np.random.default_rng(5)
    steps = random.standard_normal((8, 400))
    steps /= np.linalg.norm(steps, axis=1)[:, None]
    towards = steps.sum(axis=0) / np.linalg.norm(steps.sum(axis=0))
    own = towards + 0.5 * steps[0] + 0.03 * random.standard_normal(400)

    def tested(some: np.ndarray) -> float | None:
        gram = (some @ some.T)[np.triu_indices(len(some))]
        uids = tuple(range(len(some)))
        products = published((some @ towards).tolist())
        found = Alignment(uids=uids, products=products, norms=(1.0,) * len(uids), gram=published(gram.tolist()))
        return indicator(0, published((some @ own).tolist()), found)

    short = 1e-3 * np.tile(towards, (3, 1))
    assert tested(np.concatenate([steps, short])) == tested(steps)
