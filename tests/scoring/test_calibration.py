"""Calibration finds gain that does not show on held-out pages, or that only a step's length brings; neither chance nor
newcomers cost an honest miner."""

import math

import numpy as np
import pytest

from tplr.schemas import Evaluation
from tplr.scoring.calibration import (
    CALIBRATED,
    EXPLAINED,
    Calibration,
    EvaluatedUpdate,
    by_gradient,
    by_length,
    by_loss,
)


def measured(evaluation: Evaluation, predicted: float, *, included: bool = True) -> EvaluatedUpdate:
    return EvaluatedUpdate(evaluation, predicted, included)


def test_by_loss_compares_measured_with_predicted_gains(evaluation) -> None:
    """All gain 1 % for a prediction of 0.2, except one that gains a tenth of that, and one with as little by chance."""
    usual = [measured(evaluation(held_out=0.01, error=1e-4), 0.2)] * 2
    tenth = [measured(evaluation(held_out=0.001, error=1e-4), 0.2)] * 2
    noisy = [measured(evaluation(held_out=0.001, error=0.03), 0.2)] * 2
    found = by_loss({1: usual, 2: usual, 3: usual, 4: tenth, 5: noisy, 6: []})
    assert [found[uid] for uid in (1, 2, 3, 5, 6)] == [1.0] * 5
    error = math.sqrt(2) * 1e-4 / 5
    assert found[4] == pytest.approx((0.002 + 2 * error) / (CALIBRATED * 0.05 * 0.4))
    harmful = [measured(evaluation(held_out=-0.01, error=1e-4), 0.2)]
    assert by_loss({1: usual, 2: usual, 3: harmful})[3] == 0.0


def test_errors_of_losses_grow_with_what_all_miners_scatter(evaluation) -> None:
    """Ratios differ by more than their sequences do: that is no miner's fault."""
    draw = np.random.default_rng(0)

    def calibrated(scatter: float) -> list[float]:
        found = []
        for _ in range(200):
            ratios = 0.05 * (1 + scatter * draw.normal(size=(15, 4)))
            evaluated = {
                uid: [measured(evaluation(held_out=0.2 * one, error=5e-3), 0.2) for one in row]
                for uid, row in enumerate(ratios.tolist())
            }
            evaluated[15] = [measured(evaluation(held_out=-0.01, error=5e-3), 0.2)] * 4  # always harms
            found.append(by_loss(evaluated))
        assert max(one[15] for one in found) < 0.5
        return [one[uid] for one in found for uid in range(15)]

    assert np.mean(calibrated(0.1)) > 0.9999
    assert np.mean([one < 1 for one in calibrated(0.6)]) < 0.005  # by the errors of sequences alone 0.02


def test_miners_on_probation_do_not_change_what_losses_are_usual(evaluation) -> None:
    """Sixteen newcomers whose losses are far from what is predicted hide no overfitter."""
    usual = [measured(evaluation(held_out=0.01, error=1e-4), 0.2)] * 2
    tenth = [measured(evaluation(held_out=0.001, error=1e-4), 0.2)] * 2
    listed = {1: usual, 2: usual, 3: usual, 4: tenth}
    wild = [measured(evaluation(held_out=one, error=1e-4), 0.2, included=False) for one in (-0.9, 0.5)]
    found = by_loss(
        {**listed, **dict.fromkeys(range(10, 26), wild), 30: [one._replace(included=False) for one in tenth]}
    )
    assert {uid: found[uid] for uid in listed} == by_loss(listed)
    assert found[30] == found[4] < 0.5  # it is compared with what is usual all the same


def test_a_loss_that_is_not_finite_is_no_noise(evaluation) -> None:
    """Its standard error is unknown and stored as a very large number, which excuses nothing."""
    usual = [measured(evaluation(held_out=0.01, error=1e-4), 0.2)] * 2
    diverged = evaluation(error=1e9)
    diverged = diverged.model_copy(update={"held_out": diverged.held_out.model_copy(update={"after": None})})
    endless = measured(diverged, 0.2)
    found = by_loss({**dict.fromkeys((1, 2, 3), usual), 4: [endless] * 2, 5: [*usual, endless]})
    assert found == {1: 1.0, 2: 1.0, 3: 1.0, 4: 0.0, 5: 0.0}


def test_without_a_usual_ratio_no_loss_is_compared(evaluation) -> None:
    harmful = [measured(evaluation(held_out=-0.01), 0.2)] * 2
    assert by_loss({1: harmful, 2: harmful}) == {1: 1.0, 2: 1.0}
    assert by_loss({1: [], 2: [measured(evaluation(), -0.1)] * 2}) == {1: 1.0, 2: 1.0}
    assert by_loss({1: [measured(evaluation(held_out=-0.01), 0.2, included=False)] * 2}) == {1: 1.0}


def noisy(windows: int, miners: int, *, noise: float, seed: int = 0) -> np.ndarray:
    """Return gains of 0.2 on held-out pages with a standard deviation of ``noise``."""
    return 0.2 + np.random.default_rng(seed).normal(0, noise, (windows, miners))


def compared(held_out: np.ndarray, gains: np.ndarray, *, lengths: float = 1.0, newcomers: int = 0) -> np.ndarray:
    """Return ``by_gradient``; the last ``newcomers`` miners are not included."""
    included = np.isfinite(gains)
    included[:, gains.shape[1] - newcomers :] = False
    return by_gradient(held_out, gains, np.full(gains.shape, lengths), included)


def test_gain_on_known_pages_alone_is_not_paid() -> None:
    """Uid 3's predicted gain is twice that of the others, and its gain on held-out pages is the same."""
    held_out = noisy(20, 6, noise=0.02)
    gains = np.full((20, 6), 0.2) * [1, 1, 1, 2, 1, 1]
    factors = compared(held_out, gains)
    assert factors[[0, 1, 2, 4, 5]] == pytest.approx([1.0] * 5)
    assert factors[3] == pytest.approx(0.5 * (1 + 2 * 0.02 / math.sqrt(20) / 0.2), abs=0.03)
    assert compared(held_out * [1, 1, 1, -1, 1, 1], gains)[3] == 0.0


def test_the_factor_is_relative_to_what_is_usual() -> None:
    """All gain less on held-out pages than predicted, and one half as much as the others."""
    held_out = noisy(20, 6, noise=0.002) * [0.7, 0.7, 0.35, 0.7, 0.7, 0.7]
    assert compared(held_out, np.full((20, 6), 0.2)) == pytest.approx([1, 1, 0.5, 1, 1, 1], abs=0.01)


def test_gain_on_known_pages_in_some_windows_hides_in_no_spread_of_its_own() -> None:
    """Every third window it gains seven times as much on known pages; its standard error is that of all miners."""
    gains = np.full((21, 8), 0.2)
    gains[::3, 0] = 1.4
    factors = compared(noisy(21, 8, noise=0.1), gains)
    assert factors[0] * gains[:, 0].sum() < 1.5 * 0.2 * 21  # with its own spread 2.4 times
    assert factors[1:].min() > 0.8


@pytest.mark.parametrize("windows", [2, 3, 5, 20])
def test_chance_on_held_out_pages_costs_an_honest_miner_little(windows: int) -> None:
    """The noise of one window is half of the gain, or all of it."""
    for noise, mean in ((0.1, 0.99), (0.2, 0.97)):
        trials = [noisy(windows, 15, noise=noise, seed=seed) for seed in range(200)]
        factors = np.concatenate([compared(one, np.full(one.shape, 0.2)) for one in trials])
        assert factors.mean() > mean
        assert (factors < 1).mean() < 0.08


def test_a_window_s_scale_counts_for_gains_and_lengths() -> None:
    """In the last windows gains are an eighth, so noise is eight times as large in proportion."""
    scales = np.array([1.0] * 13 + [8.0] * 7)[:, None]
    everywhere = np.ones((20, 15), dtype=bool)
    found = []
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0, 0.1, (20, 15)) * scales
        found.append(by_gradient(0.2 + noise, np.full((20, 15), 0.2), np.ones((20, 15)) * scales, everywhere))
    factors = np.concatenate(found)
    assert factors.mean() > 0.98
    assert (factors < 1).mean() < 0.05


def test_windows_without_tests_make_no_error_smaller() -> None:
    """A validator without one of the tests predicts by held-out pages alone: then nothing differs."""
    trials = []
    for seed in range(200):
        held_out, gains = noisy(20, 15, noise=0.1, seed=seed), np.full((20, 15), 0.2)
        gains[:13] = held_out[:13]
        trials.append(compared(held_out, gains))
    factors = np.concatenate(trials)
    assert (factors < 1).mean() < 0.05
    assert factors.mean() > 0.99


def test_errors_are_proportional_to_a_step_s_length() -> None:
    """A short step has as much noise for its length: with the lengths swapped its chance would count as harm."""
    gains = np.full((20, 8), 0.2) * ([0.1] + [1.0] * 7)
    held_out = noisy(20, 8, noise=0.1) * ([0.1] + [1.0] * 7)
    lengths = np.ones((20, 8)) * ([0.1] + [1.0] * 7)
    everywhere = np.ones((20, 8), dtype=bool)
    assert by_gradient(held_out, gains, lengths, everywhere).min() > 0.9
    doubled = gains * ([2.0] + [1.0] * 7)
    assert by_gradient(held_out, doubled, lengths, everywhere)[0] < 0.8
    assert by_gradient(held_out, doubled, np.ones((20, 8)), everywhere)[0] == 1.0


def test_miners_on_probation_are_compared_and_do_not_change_what_gradients_are_usual() -> None:
    held_out, gains = noisy(20, 6, noise=0.02), np.full((20, 6), 0.2)
    wild = noisy(20, 16, noise=3.0, seed=1)
    factors = compared(np.hstack([held_out, wild, held_out / 2]), np.hstack([gains, wild * 9, gains]), newcomers=22)
    assert factors[:6] == pytest.approx(compared(held_out, gains))
    assert factors[-6:] == pytest.approx([0.5] * 6, abs=0.1)


def test_without_other_gradients_or_a_usual_ratio_no_gradient_is_compared() -> None:
    gains = np.array([[0.3, -0.1, np.nan], [0.1, 0.2, np.nan]])
    assert compared(gains, gains).tolist() == [1.0] * 3
    assert compared(np.full((1, 3), np.nan), np.full((1, 3), np.nan)).tolist() == [1.0] * 3
    assert compared(-noisy(20, 3, noise=0.01), np.full((20, 3), 0.2)).tolist() == [1.0] * 3  # no usual ratio
    assert compared(np.array([[0.1, 0.3]]), np.array([[0.3, 0.3]])).tolist() == [1.0] * 2  # no spread yet


EVEN = np.ones(20)


def worked(
    lengths: list[float],
    multiplied: list[float],
    *,
    noise: float = 0.0,
    seed: int = 0,
    newcomers: int = 0,
    scales: np.ndarray = EVEN,
    same: int = 1,
) -> np.ndarray:
    """Return ``by_length`` of 20 windows in which work gives steps these lengths, and gains of their squares.

    Args:
        multiplied: by which each miner multiplies its steps.
        noise: of a window's gain, for each unit of length, before it is scaled.
        newcomers: the last miners, which are not included.
        scales: by which each window's gains are made as large as the usual one's.
        same: number of last miners that send the same update, and share its credit.
    """
    steps, each = np.multiply(lengths, multiplied) * np.ones((20, 1)), scales[:, None]
    by_chance = np.random.default_rng(seed).normal(0, noise, steps.shape) * steps * each
    included = np.ones(steps.shape, dtype=bool)
    included[:, steps.shape[1] - newcomers :] = False
    gains = 0.02 * np.square(lengths) * multiplied
    weights = np.divide(gains, [1.0] * (len(lengths) - same) + [same] * same)
    return by_length(gains + by_chance, steps, scales=each, included=included, weights=weights)


def test_multiplying_a_step_is_paid_no_more_than_the_work_in_it() -> None:
    """Four equal miners, one of more and two of little work, of which one multiplies its steps by 2.5."""
    found = worked([1.0] * 4 + [1.2, 0.5, 0.5], [1.0] * 6 + [2.5])
    assert found == pytest.approx([1.0] * 6 + [1 / 2.5 / EXPLAINED])
    assert found[6] * 2.5 == pytest.approx(1 / EXPLAINED)  # its pay, over that of the other one of little work
    assert worked([1.0] * 4, [1.0, 1.0, 1.0, 1.1]) == pytest.approx([1.0] * 4)  # as far as honest miners differ


def test_short_steps_do_not_set_what_is_usual_for_a_length() -> None:
    """The direction of a part of a step is as good as that of the whole."""
    for part, senders in ((0.05, 5), (0.05, 12), (0.5, 8)):
        assert worked([1.0] * (3 + senders), [1.0] * 3 + [part] * senders) == pytest.approx([1.0] * (3 + senders))


def test_long_steps_escape_only_with_a_quarter_of_all_credit() -> None:
    """Beside three honest miners one that multiplies by 2.5 has less, and two have more; not if they send the same."""
    assert worked([1.0] * 3 + [0.5], [1.0] * 3 + [2.5])[3] < 0.5
    assert worked([1.0] * 3 + [0.5] * 2, [1.0] * 3 + [2.5] * 2)[3:] == pytest.approx([1.0] * 2)
    assert (worked([1.0] * 3 + [0.5] * 12, [1.0] * 3 + [2.5] * 12, same=12)[3:] < 0.5).all()


def test_chance_of_a_direction_costs_an_honest_miner_little() -> None:
    """The noise of a window's gain is a quarter of an average miner's gain, as measured, or all of it."""
    lengths = [1.0] * 8 + [0.5] * 4
    for noise in (0.005, 0.02):
        found = np.array([worked(lengths, [1.0] * 12, noise=noise, seed=seed) for seed in range(200)])
        assert found.mean() > 0.99
        assert (found < 1).mean() < 0.05
    ramp = np.geomspace(0.4, 4.0, 20)  # a new model: gains fall to a tenth, and noise does not
    found = np.array([worked(lengths, [1.0] * 12, noise=0.01, seed=seed, scales=ramp) for seed in range(200)])
    assert (found < 1).mean() < 0.01
    multiplied = [worked(lengths, [1.0] * 11 + [2.5], noise=0.005, seed=seed)[-1] for seed in range(200)]
    assert np.mean(multiplied) * 2.5 == pytest.approx(1.4, abs=0.1)


def test_lengths_of_miners_on_probation_are_compared_and_set_nothing() -> None:
    found = worked([1.0] * 4 + [0.5] * 16, [1.0] * 4 + [0.1] * 15 + [2.5], newcomers=16)
    assert found[:4] == pytest.approx([1.0] * 4)
    assert found[-1] == pytest.approx(1 / 2.5 / EXPLAINED)


def test_who_comes_while_lengths_grow_is_compared_in_its_own_windows() -> None:
    """Gains have equal scales in all windows, and lengths do not: they grow while norm caps are far above them."""
    lengths = np.linspace(0.1, 0.8, 20)[:, None] * np.ones(6)
    gains, scales = np.full((20, 6), 0.2), np.ones((20, 1))
    gains[:12, 5] = np.nan
    known = np.isfinite(gains)
    assert by_length(gains, lengths, scales=scales, included=known, weights=np.ones(6)).tolist() == [1.0] * 6
    lengths[:, 5] *= 2.0  # multiplied, with a gain of its work alone
    found = by_length(gains, lengths, scales=scales, included=known, weights=np.ones(6))
    assert found[:5] == pytest.approx([1.0] * 5)
    assert 0.25 / EXPLAINED <= found[5] < 0.4


def test_no_length_is_compared_without_a_gain_a_credit_or_a_second_window() -> None:
    ones = np.ones((20, 5))
    long = ones * [1, 1, 1, 1, 9]

    def found(gains: np.ndarray, lengths: np.ndarray = long, weight: float = 0.02) -> list[float]:
        known, scales = np.isfinite(gains), np.ones((len(gains), 1))
        return by_length(gains, lengths, scales=scales, included=known, weights=np.full(5, weight)).tolist()

    assert found(ones)[:4] == [1.0] * 4
    assert found(ones)[4] < 1
    assert found(-ones) == [1.0] * 5
    assert found(ones * [1, 1, 1, 1, -1], ones) == [1.0] * 5
    assert found(ones, weight=0.0) == [1.0] * 5
    assert found(ones[:1], long[:1]) == [1.0] * 5  # no spread yet
    assert found(ones * np.nan) == [1.0] * 5


def test_the_smallest_factor_counts() -> None:
    assert Calibration(by_loss=0.3, by_gradient=0.9, by_middle=1.0).value == 0.3
    assert Calibration(by_loss=1.0, by_gradient=0.9, by_middle=1.0).value == 0.9
    assert Calibration(by_loss=1.0, by_gradient=0.9, by_middle=0.4).value == 0.4
    assert Calibration(by_loss=1.0, by_gradient=0.9, by_middle=1.0, by_length=0.2).value == 0.2
