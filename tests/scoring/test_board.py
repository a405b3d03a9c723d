"""Pay is a pure function of the last windows: absence and chance earn nothing, and no score stays frozen."""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from observed import HPARAMS, PAY_WINDOWS, UIDS, WRONGS, good, paid

from tplr.errors import StateError
from tplr.schemas import (
    PRODUCT_DECIMALS,
    VALID,
    Alignment,
    Evidence,
    PeerObservation,
    PeerScore,
    ScoreReport,
    WeightsSet,
    published,
)
from tplr.scoring.board import Board, scores
from tplr.scoring.calibration import EXPLAINED
from tplr.scoring.credit import SHORTEST, gram_of
from tplr.scoring.measured_window import MeasuredWindow, missing_tests, own_pages_tests
from tplr.scoring.places import DISPROVING_TESTS, PROVING_WINDOWS

PROVING = max(PROVING_WINDOWS, HPARAMS.probation_windows)


def test_equal_miners_earn_the_same(observation, evidence) -> None:
    found = paid([evidence(window, good(observation)) for window in range(4)])
    assert len({repr(rounded(one)) for one in found.values()}) == 1
    first = found[1]
    assert (first.measured, first.tests, first.own_pages, first.calibration) == (4, 4, 1.0, 1.0)
    assert first.mean == pytest.approx(0.3)
    assert first.final == first.credit * first.own_pages * first.calibration > 0


def rounded(score: PeerScore) -> PeerScore:
    """Return a score without its hotkey and its last bits."""
    numbers = {name: round(getattr(score, name), 12) for name in ("credit", "merit", "final")}
    return score.model_copy(update={**numbers, "hotkey": ""})


@pytest.mark.parametrize("wrong", sorted(WRONGS))
def test_a_window_that_does_not_count_earns_nothing_whatever_the_reason(wrong, observation, evidence) -> None:
    """Presence in half of the windows earns at most half, and in none nothing; others do not lose."""
    bad = {**good(observation), 1: observation(1, **WRONGS[wrong])}
    half = [evidence(window, bad if window % 2 else good(observation)) for window in range(PAY_WINDOWS)]
    found = paid(half)
    assert 0 < found[1].final <= 0.5 * found[2].final
    all_bad = paid(
        [evidence(window, good(observation)) for window in range(3)] + [evidence(w + 3, bad) for w in range(6)]
    )
    assert all_bad[1].final == 0.0 < all_bad[2].final


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_half_of_the_windows_is_half_of_the_pay(power, observation, evidence) -> None:
    absent = {**good(observation), 1: observation(1, **WRONGS["missing"])}
    board = Board(HPARAMS.model_copy(update={"power_normalisation": power}))
    for window in range(PAY_WINDOWS):
        board.see(evidence(window, absent if window % 2 else good(observation)))
    assert board.peer_scores[1].presence == 0.5
    assert board.weights[1] == pytest.approx(board.weights[2] / 2, rel=0.01)


def test_nothing_earned_is_frozen(observation, evidence) -> None:
    """An absent miner is paid less in every window, and nothing once its work is older than the evidence."""
    dark = {**good(observation), 1: observation(1, **WRONGS["unavailable"])}
    board, shares = Board(HPARAMS), []
    for window in range(PAY_WINDOWS):
        board.see(evidence(window, good(observation)))
    for window in range(PAY_WINDOWS, 2 * PAY_WINDOWS):
        board.see(evidence(window, dark))
        shares.append(board.weights.get(1, 0.0))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0 < shares[-3] < shares[0] < 1 / len(UIDS)


def test_a_window_of_another_scale_before_anybody_is_listed_changes_little(observation, evidence) -> None:
    """A validator could report all products of a window at a run's start a hundred times as large."""
    start = {uid: observation(uid, listed=False, included=False, probation=True) for uid in UIDS}
    board, plain = Board(HPARAMS), Board(HPARAMS)
    for window in range(8):
        seen = evidence(window, start if window < 4 else good(observation))
        plain.see(seen)
        if window in (1, 3):
            assert seen.alignment
            large = {"products": tuple(100 * one for one in seen.alignment.products)}
            large["gram"] = tuple(1e4 * one for one in seen.alignment.gram)
            seen = seen.model_copy(update={"alignment": seen.alignment.model_copy(update=large)})
        board.see(seen)
        assert [board.proven(uid) for uid in UIDS] == [plain.proven(uid) for uid in UIDS]
    assert board.proven(1)
    assert board.weights == pytest.approx(plain.weights, rel=1e-6)


def test_own_blindness_is_blank_and_only_for_who_was_included(observation, evidence) -> None:
    """The validator's own data failed: no miner of the included set loses, and no other miner gains."""
    absent = {**good(observation), 1: observation(1, **WRONGS["missing"])}
    seen = [evidence(window, good(observation)) for window in range(4)]
    unmeasured = {
        uid: one.model_copy(update={"evaluation": None, "assigned_pages": None}) for uid, one in absent.items()
    }
    blind = Evidence(window=4, observations={str(uid): one for uid, one in unmeasured.items()})
    before, after = paid(seen), paid([*seen, blind])
    assert after[1].final < before[1].final
    for uid in UIDS[1:]:
        assert after[uid].final >= before[uid].final
        assert after[uid].mean == before[uid].mean


def test_probation_is_measured_and_earns_nothing(observation, evidence) -> None:
    newcomer = {"listed": False, "probation": True, "included": False}
    seen = {**good(observation), 6: observation(6, **newcomer)}
    board = Board(HPARAMS)
    for window in range(PROVING):
        assert not board.proven(6)
        board.see(evidence(window, seen))
    assert board.proven(6)
    assert board.peer_scores[6].merit == pytest.approx(board.peer_scores[1].merit)  # the peer list is ranked by merit
    assert board.peer_scores[6].mean == pytest.approx(0.3)
    assert board.peer_scores[6].final == board.peer_scores[6].credit == 0.0
    without = paid([evidence(window, good(observation, UIDS[:5])) for window in range(PROVING)])
    for uid in UIDS[:5]:  # a copy on probation takes nothing from applied miners
        assert board.peer_scores[uid].credit == pytest.approx(without[uid].credit)


def test_who_is_fully_trusted_shares_only_with_its_like(observation, evaluation, evidence) -> None:
    """A copy that passes some of its tests gets almost nothing if its victim passes all; two fully trusted ones
    share."""
    lucky = observation(1, evaluation=evaluation(assigned=0.00922, held_out=0.01, error=0.002))
    for copier, own, share in ((lucky, 0.5, 0.02), (observation(1), 1.0, 0.5)):
        windows = [evidence(window, {**good(observation), 1: copier}) for window in range(4)]
        for i, one in enumerate(windows):
            assert one.alignment is not None
            gram = (one.alignment.gram[0], 1.0, *one.alignment.gram[2:])  # uid 1 and uid 2 send the same
            windows[i] = one.model_copy(update={"alignment": one.alignment.model_copy(update={"gram": gram})})
        found = paid(windows)
        assert found[1].own_pages == pytest.approx(own, abs=0.2)
        assert found[1].credit == pytest.approx(share * found[3].credit, rel=0.02)
        assert found[2].credit == pytest.approx(found[3].credit / (2 if own == 1.0 else 1), rel=0.02)


def test_merit_is_what_would_be_paid_for_all_measured_windows(observation, evidence) -> None:
    """A miner can't prove itself in a window in which its update was not requested: such a window does not count. An
    absence does."""
    unasked = {**good(observation), 1: observation(1, **WRONGS["gone"]), 2: observation(2, **WRONGS["missing"])}
    found = paid([evidence(window, unasked if window < 2 else good(observation)) for window in range(4)])
    assert found[1].merit == pytest.approx(found[3].merit)
    assert found[1].final == pytest.approx(found[3].final / 2)
    assert found[2].merit == pytest.approx(found[3].merit / 2) == found[2].final
    assert found[3].merit == found[3].final


@pytest.mark.parametrize("gain", [0.0, -0.3])
def test_who_does_not_help_is_neither_paid_nor_proven(gain, observation, evidence) -> None:
    board = Board(HPARAMS)
    for window in range(PAY_WINDOWS):
        board.see(evidence(window, good(observation), uid_1=gain))
    assert board.peer_scores[1].final == 0.0
    assert not board.proven(1)
    assert 1 not in board.weights


def test_without_its_own_measures_a_validator_judges_nobody(observation, evidence) -> None:
    board = Board(HPARAMS)
    for window in range(PAY_WINDOWS):
        dark = {uid: observation(uid, **WRONGS["unavailable"]) for uid in UIDS}
        board.see(evidence(window, dark))
    assert {board.proven(uid) for uid in UIDS} == {None}


def test_chance_is_neither_paid_nor_proven(observation, evidence) -> None:
    noise = np.random.default_rng(1).normal(0.0, 0.3, PAY_WINDOWS)
    noise -= noise.mean() - 0.02
    board = Board(HPARAMS)
    for window, gain in enumerate(noise.tolist()):
        board.see(evidence(window, good(observation), uid_1=gain))
    assert board.peer_scores[1].mean == pytest.approx(0.02)
    assert board.peer_scores[1].credit == 0.0
    assert not board.proven(1)


def test_own_pages_are_compared_over_all_windows(observation, evidence) -> None:
    """Two of six are tested in each window; uid 1 fits its own pages better, and uid 2 has random results."""
    random = np.random.default_rng(3)
    board = Board(HPARAMS.model_copy(update={"pay_windows": 12}))
    for window in range(12):
        tested = (1, 2) if window % 2 else (3, 4)
        seen = {uid: observation(uid, sampled=uid in tested, evaluation=None) for uid in UIDS}
        one = evidence(window, seen, **{f"uid_{uid}": 0.3 + 0.02 * random.standard_normal() for uid in UIDS})
        for uid in tested:
            products = 0.3 + 0.02 * random.standard_normal(len(UIDS))
            products[UIDS.index(uid)] += 0.2 if uid in (1, 3) else 0.0
            one.observations[str(uid)] = seen[uid].model_copy(update={"assigned_products": published(products)})
        board.see(Evidence.model_validate_json(one.model_dump_json()))
    scores = board.peer_scores
    assert [scores[uid].tests for uid in UIDS] == [6, 6, 6, 6, 0, 0]
    assert scores[1].own_pages == scores[3].own_pages == 1.0
    assert max(scores[2].own_pages, scores[4].own_pages) < 0.9
    assert all(scores[uid].own_pages == 0.0 for uid in UIDS[4:])  # never tested


def test_a_test_that_was_not_possible_is_not_missing(observation, evaluation, evidence) -> None:
    """Nobody has as many others of the included set as it needs: without a fault the losses are compared instead."""
    for count, expected in ((3, set()), (4, {1}), (6, {1})):
        uids = UIDS[:count]
        seen = {uid: observation(uid, evaluation=None, sampled=uid == 1) for uid in uids}
        assert missing_tests(evidence(0, seen)) == expected
    newcomers = {uid: observation(uid, evaluation=None, included=uid < 3, sampled=uid == 1) for uid in UIDS}
    assert missing_tests(evidence(0, newcomers)) == set()


@pytest.mark.parametrize("instead", ["nothing", "losses"])
def test_tests_that_a_validator_leaves_out_as_faults_count_zero(
    instead: str, observation, evaluation, evidence
) -> None:
    """Otherwise it could publish only those that a friend passes by chance, or a test by loss, which all pass."""
    random, friend = np.random.default_rng(1), UIDS[-1]  # its updates are from other pages
    windows = []
    for window in range(PAY_WINDOWS):
        tests = {uid: 0.3 + 0.02 * random.standard_normal(len(UIDS)) for uid in UIDS}
        for uid in UIDS[:-1]:
            tests[uid][UIDS.index(uid)] += 0.2
        tested = {
            uid: observation(uid, assigned_products=published(one), evaluation=None) for uid, one in tests.items()
        }
        windows.append(
            evidence(window, tested, **{f"uid_{uid}": 0.3 + 0.02 * random.standard_normal() for uid in UIDS})
        )

    def left_out(one: Evidence) -> Evidence:
        losses = evaluation(assigned=0.01, held_out=0.01) if instead == "losses" else None
        seen = observation(friend, evaluation=losses)
        return one.model_copy(update={"observations": {**one.observations, str(friend): seen}})

    passed = [own_pages_tests(one)[friend, friend] for one in windows]
    best = passed.index(max(passed))
    chosen = [one if i == best else left_out(one) for i, one in enumerate(windows)]
    only = paid([windows[best]])[friend]
    assert (only.tests, only.own_pages) == (1, 1.0)
    for shown in (chosen, [left_out(one) for one in windows]):
        found = paid(shown)
        assert (found[friend].tests, found[friend].own_pages, found[friend].final) == (PAY_WINDOWS, 0.0, 0.0)
        assert [found[uid].own_pages for uid in UIDS[:-1]] == [1.0] * (len(UIDS) - 1)


def test_own_pages_decide(observation, evaluation, evidence) -> None:
    elsewhere = observation(1, evaluation=evaluation(assigned=0.005, held_out=0.01))
    untested = observation(2, sampled=False, evaluation=None)
    found = paid([evidence(window, {**good(observation), 1: elsewhere, 2: untested}) for window in range(3)])
    assert (found[1].tests, found[1].own_pages, found[1].final) == (3, 0.0, 0.0)
    assert (found[2].tests, found[2].own_pages, found[2].final) == (0, 0.0, 0.0)
    assert found[1].credit == found[2].credit == 0.0 < found[3].credit


def test_who_repeats_another_s_work_takes_nothing_from_it(observation, evaluation, evidence) -> None:
    """A copy that fails the own-pages test earns nothing, and its victim no less than without it."""
    copier = observation(1, evaluation=evaluation(assigned=0.005, held_out=0.01))
    windows = [evidence(window, {**good(observation), 1: copier}) for window in range(DISPROVING_TESTS)]

    def copied(one: Evidence) -> Evidence:
        assert one.alignment is not None
        gram = list(one.alignment.gram)
        gram[1] = 1.0  # uid 1 and uid 2 send the same
        return one.model_copy(update={"alignment": one.alignment.model_copy(update={"gram": tuple(gram)})})

    found = paid([copied(one) for one in windows])
    assert found[1].final == found[1].merit == 0.0
    assert found[2].credit == pytest.approx(found[3].credit)
    board = Board(HPARAMS.model_copy(update={"pay_windows": DISPROVING_TESTS}))
    for one in windows:
        board.see(one)
    assert board.proven(2)
    assert not board.proven(1)


def test_gain_that_is_predicted_and_not_measured_is_not_paid(observation, evaluation, evidence) -> None:
    empty = observation(1, evaluation=evaluation(assigned=0.01, held_out=0.0, error=1e-5))
    found = paid([evidence(window, {**good(observation), 1: empty}) for window in range(3)])
    assert found[1].calibration < 0.01
    assert found[2].calibration == 1.0


def with_squared_length(one: Evidence, *, squared: float, same: int = 1) -> Evidence:
    """Return evidence in which the step of uid 1 has this inner product with itself.

    Args:
        same: number of uids, from 1, that send this step.
    """
    assert one.alignment is not None
    gram = gram_of(one.alignment)
    gram[:same, :same] = squared
    upper = tuple(gram[np.triu_indices(len(gram))].tolist())
    return one.model_copy(update={"alignment": one.alignment.model_copy(update={"gram": upper})})


def test_a_negative_squared_length_of_a_false_report_is_the_shortest_one(observation, evidence) -> None:
    """Its root is no number, and would make an audit's scores none."""
    windows = [with_squared_length(evidence(window, good(observation)), squared=-1.0) for window in range(4)]
    assert MeasuredWindow(windows[0], HPARAMS).length(1) == math.sqrt(SHORTEST)
    assert all(math.isfinite(one.calibration) for one in paid(windows).values())


@pytest.mark.parametrize("included", [True, False])
def test_a_run_whose_steps_are_all_far_below_the_norm_caps_proves_its_miners(included, observation, evidence) -> None:
    """Caps fall only once updates are included; a step is short beside the longest one, not beside the cap."""
    board = Board(HPARAMS)
    for window in range(PROVING):
        seen = evidence(window, {uid: observation(uid, included=included) for uid in UIDS})
        assert seen.alignment
        few = {"products": tuple(0.008 * one for one in seen.alignment.products)}
        few["gram"] = tuple(0.008**2 * one for one in seen.alignment.gram)
        board.see(seen.model_copy(update={"alignment": seen.alignment.model_copy(update=few)}))
    assert {board.proven(uid) for uid in UIDS} == {True}


def test_a_multiplied_step_is_paid_for_its_work_alone_where_lengths_are_chosen(observation, evidence) -> None:
    """Uid 1 sends a step of twice the others' length, for a third more gain; DeMo gives all steps the same length."""

    windows = [
        with_squared_length(evidence(window, good(observation), uid_1=0.4), squared=2.0**2) for window in range(4)
    ]
    found = paid(windows)
    assert found[1].calibration == pytest.approx(0.4 / (EXPLAINED * 0.3 * 2.0**2))
    assert {found[uid].calibration for uid in UIDS[1:]} == {1.0}
    demo = HPARAMS.model_copy(update={"outer": "demo"})
    assert {one.calibration for one in scores([MeasuredWindow(one, demo) for one in windows]).values()} == {1.0}


def test_two_uids_of_one_update_set_what_is_usual_for_a_length_as_one(observation, evidence) -> None:
    """Their gains are more than a quarter of all, and their credit is less."""
    products = {"uid_1": 0.35, "uid_2": 0.35}
    windows = [evidence(window, good(observation), **products) for window in range(4)]
    found = paid([with_squared_length(one, squared=2.0**2, same=2) for one in windows])
    for uid in (1, 2):
        assert found[uid].calibration == pytest.approx(0.35 / (EXPLAINED * 0.3 * 2.0**2))
    assert {found[uid].calibration for uid in UIDS[2:]} == {1.0}


def with_tests(observation, window: int, evidence, *, probation: Collection[int] = (), **held_out: float) -> Evidence:
    """Return evidence in which all gain 0.3 on all known pages, and 0.9 on their own."""
    seen = {}
    for of in UIDS:
        on_pages = tuple(0.9 if uid == of else 0.3 for uid in UIDS)
        place = {"listed": False, "included": False, "probation": True} if of in probation else {}
        seen[of] = observation(of, evaluation=None, assigned_products=on_pages, **place)
    return evidence(window, seen, **held_out)


def test_gain_on_known_pages_alone_is_not_paid_and_harm_elsewhere_loses_the_place(observation, evidence) -> None:
    """On held-out pages uid 1 gains a third of what it gains on known ones; 2, and 3 on probation, do harm."""
    board = Board(HPARAMS.model_copy(update={"pay_windows": DISPROVING_TESTS}))
    for window in range(DISPROVING_TESTS):
        board.see(with_tests(observation, window, evidence, probation=[3], uid_1=0.1, uid_2=-0.2, uid_3=-0.2))
    found = board.peer_scores
    assert found[1].calibration == pytest.approx(1 / 3, abs=0.01)
    assert found[2].calibration == found[3].calibration == found[2].final == found[3].merit == 0.0
    assert found[4].calibration == 1.0
    assert found[2].mean == pytest.approx(found[4].mean)  # gains on the known pages do not show the difference
    assert [board.proven(uid) for uid in UIDS] == [True, False, False, True, True, True]


def test_honest_work_on_probation_does_not_make_up_for_what_is_paid_later(observation, evidence) -> None:
    windows = [with_tests(observation, window, evidence, probation=[1]) for window in range(4)]
    windows += [with_tests(observation, window, evidence, uid_1=0.1) for window in range(4, 8)]
    found = paid(windows)
    assert found[1].calibration == pytest.approx(1 / 3, abs=0.01)
    assert found[2].calibration == 1.0


def test_a_new_hotkey_keeps_nothing_and_who_leaves_is_forgotten(observation, evidence) -> None:
    seen = [evidence(window, good(observation)) for window in range(3)]
    stranger = {**good(observation, UIDS[:3]), 2: observation(2).model_copy(update={"hotkey": "somebody else"})}
    found = paid([*seen, evidence(3, stranger)])
    assert sorted(found) == [1, 2, 3]
    assert (found[2].hotkey, found[2].measured, found[2].tests) == ("somebody else", 1, 1)
    assert found[1].measured == 4
    assert found[2].credit <= found[1].credit / 4  # its earlier windows count zero


def test_only_the_last_windows_count(observation, evidence) -> None:
    early = [evidence(window, good(observation), uid_1=0.9) for window in range(3)]
    late = [evidence(window, good(observation)) for window in range(3, 3 + PAY_WINDOWS)]
    assert paid([*early, *late]) == paid(late)
    # Windows count by number: after a long absence no window is left.
    assert paid([*early, evidence(50, good(observation))]) == paid([evidence(50, good(observation))])


def test_scores_follow_from_the_reports(observation, evidence) -> None:
    board = Board(HPARAMS)
    windows = [evidence(window, good(observation)) for window in range(3)]
    for one in windows:
        board.see(one)
    other = Board(HPARAMS)
    other.resume([report(one) for one in windows[:2]])
    assert other.see(windows[2]).peer_scores == board.peer_scores
    assert other.follows_from == board.follows_from == (0, 1)


@pytest.mark.parametrize("lost", [0, 5])
def test_the_sample_follows_from_the_reports_that_an_audit_reads(lost: int, observation, evidence) -> None:
    """Also after windows in which the validator was down."""
    board, again = (Board(HPARAMS.model_copy(update={"uids_per_window": 1})) for _ in range(2))
    windows = [
        evidence(window, {uid: observation(uid, sampled=uid % 2 == window % 2) for uid in UIDS})
        for window in range(2 * PAY_WINDOWS)
    ]
    for one in windows:
        board.see(one)
    pool, following = {uid: f"hotkey-{uid}" for uid in UIDS}, 2 * PAY_WINDOWS + lost
    before = [board.sample(pool, following, seed) for seed in range(300)]
    board.see(evidence(following, good(observation)))
    again.resume([report(one) for one in windows if one.window in board.follows_from])
    assert [again.sample(pool, following, seed) for seed in range(300)] == before


def report(one: Evidence, **changes: Any) -> ScoreReport:
    made: dict[str, Any] = {
        "uid": 0,
        "profile": "hardened",
        "held_out_pages": "a" * 64,
        "faults": (),
        "follows_from": (),
        "peer_scores": {},
        "struck": {},
        "weights": {},
        "weights_set": None,
    }
    return ScoreReport(window=one.window, observations=one.observations, alignment=one.alignment, **{**made, **changes})


def test_foreign_state_is_refused_and_changes_nothing(observation, evidence) -> None:
    board = Board(HPARAMS)
    board.see(evidence(0, good(observation)))
    state, held = board.state_dict(), board.peer_scores
    foreign = [{}, {**state, "version": 3}, {**state, "more": 1}, {"version": 3, "standings": {}}]
    for wrong in (*foreign, {**state, "evidence": [{"x": 1}]}, {**state, "evidence": 7}):
        with pytest.raises(StateError, match="scores: "):
            board.load_state_dict(wrong)
    assert board.peer_scores == held


def test_a_report_of_256_uids_is_below_1_mib(evaluation) -> None:
    """With all uids measured, and eight evaluated in the window."""
    random, uids = np.random.default_rng(3), range(256)

    def numbers(count: int) -> tuple[float, ...]:
        return tuple((-random.uniform(0.1, 1, count)).round(PRODUCT_DECIMALS).tolist())

    alignment = Alignment(uids=tuple(uids), products=numbers(256), norms=numbers(256), gram=numbers(256 * 257 // 2))
    seen = {
        str(uid): PeerObservation(
            hotkey="5" * 48,
            listed=True,
            included=True,
            sampled=uid < 8,
            verdict=VALID,
            assigned_pages=True,
            behind=0,
            evaluation=evaluation() if uid < 8 else None,
            assigned_products=numbers(256) if uid < 8 else (),
        )
        for uid in uids
    }
    third = 1 / 3
    score = PeerScore(
        hotkey="5" * 48, measured=20, mean=third, error=third, credit=third, tests=4, presence=third, final=third
    )
    weights = {str(uid): third / 100 for uid in uids}
    made = report(
        Evidence(window=10**6, observations=seen, alignment=alignment),
        follows_from=tuple(range(10**6 - 19, 10**6)),
        peer_scores={str(uid): score for uid in uids},
        struck={str(uid): ("out_of_sync", "wrong_pages") for uid in uids},
        weights=weights,
        weights_set=WeightsSet(block=10**7, intended=weights, on_chain=weights),
    )
    body = made.sealed().model_dump_json().encode()
    assert len(body) < 0.75 * 2**20
    assert ScoreReport.model_validate_json(body).evidence.alignment == alignment


def test_miners_of_a_full_subnet_are_paid_like_those_of_a_small_one(observation, evidence) -> None:
    """Each of 256 equal miners has the score of each of six; one that trained on other pages gets nothing."""
    wrong = 7
    seen = {**good(observation, range(256)), wrong: observation(wrong, **WRONGS["wrong_pages"])}
    found = scores([MeasuredWindow(evidence(window, seen), HPARAMS) for window in range(20)])
    few = scores([MeasuredWindow(evidence(window, good(observation)), HPARAMS) for window in range(20)])
    assert found.keys() == seen.keys()
    assert found.pop(wrong).final == 0.0
    assert [one.final for one in found.values()] == pytest.approx([few[1].final] * 255)
    assert few[1].final > 0
