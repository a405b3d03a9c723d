"""Steps whose gain is gone in the middle of the window's step are neither paid nor applied for long."""

from collections.abc import Mapping

import numpy as np
import pytest
from observed import HPARAMS, UIDS, good

from tplr.schemas import UNREAD, Evidence
from tplr.scoring.board import Board
from tplr.scoring.measured_window import MeasuredWindow
from tplr.scoring.overshoot import ERRORS, Middle, middles

WINDOWS = 20
NEWCOMERS = tuple(range(20, 40))
# Factor of a miner that keeps nothing: errors of the mean difference of a gain and half of another, over half a gain.
BY_CHANCE = ERRORS * 0.05 * (1 + 0.5**2) ** 0.5 / WINDOWS**0.5 / (0.5 * 0.3)
HARDENED = HPARAMS.model_copy(update={"pay_windows": WINDOWS})


def in_the_middle(evidence: Evidence, gains: Mapping[int, float]) -> Evidence:
    """Return the evidence with these products in the middle of the step, by uid."""
    assert evidence.alignment is not None
    middle = tuple(gains[uid] for uid in evidence.alignment.uids)
    return evidence.model_copy(update={"alignment": evidence.alignment.model_copy(update={"middle": middle})})


@pytest.fixture
def windows(observation, evidence):
    """Return windows in which every update has half of its gain in the middle of the step, or ``shares`` of it."""

    def make(shares: Mapping[int, float], *, first: int = 0, count: int = WINDOWS, newcomers=(), applied=()):
        random, found = np.random.default_rng(first), []
        uids = [*UIDS, *newcomers]
        seen = good(observation, uids) | {
            uid: observation(uid, included=False, listed=False, probation=True)
            for uid in newcomers
            if uid not in applied
        }
        for window in range(first, first + count):
            gains = {uid: 0.3 + 0.05 * random.normal() for uid in uids}
            middle = {uid: shares.get(uid, 0.5) * 0.3 + 0.05 * random.normal() for uid in uids}
            named = {f"uid_{uid}": gain for uid, gain in gains.items()}
            found.append(in_the_middle(evidence(window, seen, **named), middle))
        return found

    return make


def judged(windows: list[Evidence]) -> dict[int, Middle]:
    measured = [MeasuredWindow(one, HARDENED) for one in windows]
    return middles(measured, measured[-1].hotkeys)


def factors(windows: list[Evidence]) -> dict[int, float]:
    return {uid: one.factor for uid, one in judged(windows).items()}


def test_a_step_that_loses_its_gain_is_not_paid_and_has_no_place(windows) -> None:
    found = windows({1: 0.25, 2: -0.5})
    shares = factors(found)
    assert shares[1] == pytest.approx(0.5 + BY_CHANCE, abs=0.1)
    assert shares[2] == 0.0
    assert [shares[uid] for uid in UIDS[2:]] == [1.0] * 4
    board = Board(HARDENED)
    for one in found:
        board.see(one)
    assert board.peer_scores[2].calibration == board.peer_scores[2].final == 0.0
    assert {uid: board.proven(uid) for uid in UIDS} == {**dict.fromkeys(UIDS, True), 2: False}
    assert board.places[2].reason.startswith("its steps overshoot")
    assert 2 not in board.weights


def test_it_loses_its_place_within_a_few_windows(windows) -> None:
    board = Board(HARDENED)
    for one in windows({}, count=10):
        board.see(one)
    assert [board.proven(uid) for uid in UIDS] == [True] * len(UIDS)
    harmful = windows({1: -1.0}, first=10, count=8)
    for one in harmful:
        board.see(one)
    assert {uid: board.proven(uid) for uid in UIDS} == {1: False} | dict.fromkeys(UIDS[1:], True)


@pytest.mark.parametrize("share", [1.0, 0.4, 0.05, 0.0, -0.2])
def test_a_loss_of_gain_that_all_have_costs_nobody(windows, share: float) -> None:
    """With a large outer rate every step is far into the curvature. Near zero, chance alone tells miners apart."""
    for seed in range(10):
        found = judged(windows(dict.fromkeys(UIDS, share), first=1000 * seed))
        assert not any(one.overshoots for one in found.values())
        if share not in (0.0, 0.05):
            assert min(one.factor for one in found.values()) > 0.8


@pytest.mark.parametrize("usual", [0.04, 0.0, -0.2])
def test_who_loses_more_than_all_others_is_found_where_nearly_nothing_is_left(windows, usual: float) -> None:
    """As late in a run whose learning rate does not fall."""
    found = judged(windows(dict.fromkeys(UIDS, usual) | {1: usual - 0.6}))
    assert found[1] == Middle(0.0, overshoots=True)
    assert not any(found[uid].overshoots for uid in UIDS[1:])
    assert min(found[uid].factor for uid in UIDS[1:]) > 0.8


@pytest.mark.parametrize("behind", [0, UNREAD])
def test_steps_count_where_a_rule_is_broken(windows, behind: int) -> None:
    """Such updates are not paid, but may be applied."""
    found = windows({})
    for i in range(0, WINDOWS, 3):
        seen = found[i].observations["1"].model_copy(update={"behind": behind})
        middle = dict(zip(UIDS, found[i].alignment.middle, strict=True)) | {1: -1.5}
        observed = found[i].model_copy(update={"observations": found[i].observations | {"1": seen}})
        found[i] = in_the_middle(observed, middle)
    assert judged(found)[1] == Middle(0.0, overshoots=True)


def test_a_miner_is_compared_in_its_own_windows(observation, windows) -> None:
    """In windows with a long step everybody keeps less: who was only there then is no worse."""
    early = windows(dict.fromkeys(UIDS, 0.1), count=10)
    late = windows(dict.fromkeys(UIDS, 0.9), first=10, count=10)
    absent = observation(1, included=False, verdict="missing", assigned_pages=None, evaluation=None)
    without = [
        one.model_copy(
            update={
                "observations": one.observations | {"1": absent},
                "alignment": one.alignment.model_copy(
                    update={
                        "uids": one.alignment.uids[1:],
                        "products": one.alignment.products[1:],
                        "middle": one.alignment.middle[1:],
                        "norms": one.alignment.norms[1:],
                        "gram": one.alignment.gram[len(UIDS) :],
                    }
                ),
            }
        )
        for one in late
    ]
    found = judged([*early, *without])
    assert [one.factor for one in found.values()] == [1.0] * len(UIDS)
    assert not any(one.overshoots for one in found.values())


def test_one_window_far_beyond_the_slope_hides_nobody(windows) -> None:
    wild = windows(dict.fromkeys(UIDS, -30.0), first=WINDOWS - 1, count=1)
    found = judged([*windows({1: -0.5}, count=WINDOWS - 1), *wild])
    assert found[1].overshoots
    assert [found[uid].factor for uid in UIDS[1:]] == [1.0] * 5


def test_chance_costs_an_honest_miner_little(windows) -> None:
    runs = [windows({}, first=1000 * seed, count=count) for seed in range(30) for count in (3, 5, 20)]
    found = np.array([[*factors(one).values()] for one in runs])
    assert found.mean() > 0.98
    assert (found < 0.25).mean() == 0.0


def test_reports_from_before_have_no_middle_and_lower_no_factor(windows, observation, evidence) -> None:
    before = [evidence(window, good(observation)) for window in range(10)]
    assert set(factors(before).values()) == {1.0}
    mixed = factors([*before, *windows({1: 0.0}, first=10, count=10)])
    assert mixed[1] < 0.5
    assert [mixed[uid] for uid in UIDS[1:]] == [1.0] * 5


def test_newcomers_change_nobody_s_factor_and_honest_work_on_probation_makes_up_for_nothing(windows) -> None:
    crowd = windows(dict.fromkeys(NEWCOMERS, 3.0) | {1: 0.0}, newcomers=NEWCOMERS)
    found = factors(crowd)
    assert [found[uid] for uid in UIDS[1:]] == [1.0] * 5
    assert found[1] == pytest.approx(BY_CHANCE, abs=0.1)
    applied = windows({20: -0.5}, count=10, newcomers=(20,), applied=(20,))
    waiting = windows({20: 1.0}, first=10, count=10, newcomers=(20,))
    assert factors([*applied, *waiting])[20] < 0.3
