"""Predicted gains: from all gradients that a validator computed in a window, but those on a miner's own pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplr.schemas import Alignment, Evidence, PeerObservation
from tplr.scoring.gain import own_pages_products, predicted_gains, predicting_tests
from tplr.scoring.measured_window import MeasuredWindow

UIDS = (2, 3, 5)
products = st.floats(-1, 1)


def alignment(*found: float) -> Alignment:
    count = len(found)
    gram = np.eye(count)[np.triu_indices(count)]
    return Alignment(uids=UIDS[:count], products=found, norms=(1.0,) * count, gram=tuple(gram.tolist()))


def test_without_a_test_it_is_the_product_with_the_gradient_on_held_out_pages():
    assert predicted_gains(alignment(0.1, 0.2, -0.3), {}) == {2: 0.1, 3: 0.2, 5: -0.3}
    assert predicted_gains(alignment(), {7: ()}) == {}


def test_own_pages_do_not_count_and_those_of_others_do():
    tests = {2: (0.9, 0.4, 0.5), 3: (0.3, 0.8, 0.1), 9: (0.2, 0.3, 0.3)}
    found = predicted_gains(alignment(0.1, 0.2, 0.3), tests)
    assert found == pytest.approx({2: 0.2, 3: 0.3, 5: 0.3})  # of 0.1, 0.3, 0.2; of 0.2, 0.4, 0.3; of all four


@given(st.lists(products, min_size=2, max_size=9), st.data())
def test_fewer_than_half_of_the_gradients_move_it_no_further_than_the_others(honest, data):
    others = data.draw(st.lists(products, max_size=len(honest) - 1))
    rows = data.draw(st.permutations([*honest, *others]))
    found = predicted_gains(alignment(rows[0]), {uid: (one,) for uid, one in enumerate(rows[1:], start=10)})
    assert min(honest) <= found[2] <= max(honest)


def test_sixteen_tests_leave_less_than_half_of_the_noise():
    draw = np.random.default_rng(0)
    found, alone = [], []
    for _ in range(400):
        noisy = 0.2 + draw.normal(0, 0.1, 17)
        tests = {uid: (one,) for uid, one in enumerate(noisy[1:].tolist(), start=10)}
        found.append(predicted_gains(alignment(float(noisy[0])), tests)[2])
        alone.append(noisy[0])
    assert np.mean(found) == pytest.approx(0.2, abs=0.005)
    assert np.std(found) < 0.4 * np.std(alone)  # 1.25 / sqrt(17) = 0.30 for a median


def seen_by(observation, evaluation, **tests: tuple[float, ...]) -> dict[str, PeerObservation]:
    """Return observations of ``UIDS``; those with ``tests`` are tested, and the others not sampled."""
    found = {str(uid): observation(uid, evaluation=None, sampled=f"uid_{uid}" in tests) for uid in UIDS}
    for uid in UIDS:
        found[str(uid)] = found[str(uid)].model_copy(update={"assigned_products": tests.get(f"uid_{uid}", ())})
    found["2"] = found["2"].model_copy(update={"evaluation": evaluation()})
    return found


def test_a_window_pays_by_all_gradients_and_calibrates_by_that_of_the_measured_pages(
    constants, observation, evaluation
):
    seen = seen_by(observation, evaluation, uid_3=(0.4, 0.9, 0.5), uid_5=(0.3, 0.1, 0.9))
    aligned = alignment(0.1, 0.2, 0.3).model_copy(update={"unit": 2.0})
    window = MeasuredWindow(Evidence(window=1, observations=seen, alignment=aligned), constants())
    hotkey = seen["2"].hotkey
    assert window.gains[2] == pytest.approx(0.3)
    assert window.measured.products == pytest.approx((0.3, 0.15, 0.4))
    assert window.included_gains == pytest.approx([0.3, 0.15, 0.4])
    assert window.evaluated(2, hotkey) == (seen["2"].evaluation, 0.1 * 2.0 / 5.0, True)  # of a loss of 5
    assert window.evaluated(3, seen["3"].hotkey) is None
    assert window.held_out_and_gain(2, hotkey) == pytest.approx((0.1, 0.3))


def test_half_as_many_tests_of_newcomers_predict_gains_as_of_included_miners(constants, observation, evaluation):
    """Anybody can have many newcomers, and train on the pages of all of them."""
    tests = {"uid_2": (0.9, 0.8, 0.7), "uid_3": (0.4, 0.9, 0.5), "uid_5": (0.3, 0.1, 0.9)}
    seen = seen_by(observation, evaluation, **tests)
    evidence = Evidence(window=1, observations=seen, alignment=alignment(0.1, 0.2, 0.3))

    def predicting(*newcomers: str, without: str = "") -> set[int]:
        known = {uid: one.model_copy(update={"included": uid not in newcomers}) for uid, one in seen.items()}
        if without:
            known[without] = known[without].model_copy(update={"sampled": False, "assigned_products": ()})
        return {*predicting_tests(evidence.model_copy(update={"observations": known}))}

    assert predicting() == predicting("3") == {2, 3, 5}
    assert predicting("3", "5") == {2}
    assert predicting("2", "3", "5") == {2, 3, 5}  # nobody is paid for such a window
    assert predicting("3", "5", without="2") == set()
    assert own_pages_products(evidence).keys() == {2, 3, 5}
    newcomers = {uid: one.model_copy(update={"included": uid == "2"}) for uid, one in seen.items()}
    gains = MeasuredWindow(evidence.model_copy(update={"observations": newcomers}), constants()).gains
    assert gains == pytest.approx({2: 0.1, 3: 0.5, 5: 0.5})  # of held-out pages and those of uid 2


def test_without_one_of_the_tests_only_the_held_out_gradient_predicts(constants, observation, evaluation):
    """So a validator can choose between two gains by the faults that it reports, and not among all gradients."""
    seen = seen_by(observation, evaluation, uid_3=(0.4, 0.9, 0.5), uid_5=(0.3, 0.1, 0.9))
    for included in (True, False):
        missing = seen["5"].model_copy(update={"assigned_products": (), "included": included})
        evidence = Evidence(window=1, observations={**seen, "5": missing}, alignment=alignment(0.1, 0.2, 0.3))
        assert predicting_tests(evidence) == {}
        assert MeasuredWindow(evidence, constants()).gains == pytest.approx({2: 0.1, 3: 0.2, 5: 0.3})
    unmeasured = seen["5"].model_copy(update={"assigned_products": (), "verdict": "late"})
    two = alignment(0.1, 0.2)
    shorter = {
        uid: one.model_copy(update={"assigned_products": one.assigned_products[:2]}) for uid, one in seen.items()
    }
    evidence = Evidence(window=1, observations={**shorter, "5": unmeasured}, alignment=two)
    assert predicting_tests(evidence).keys() == {3}  # there was nothing to test
