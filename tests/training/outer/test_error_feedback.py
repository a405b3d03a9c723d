"""How long error feedback is kept, and when it is reset so that no value is sent twice."""

import pytest
import torch

from tplr.errors import StateError
from tplr.training.outer.error_feedback import ErrorFeedback

PARAMETERS = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}


def kept(window: int, *, restored: bool = False) -> ErrorFeedback:
    """Return error feedback of ones, from ``window``."""
    error_feedback = ErrorFeedback(PARAMETERS, stale_after_windows=5)
    for tensor in error_feedback.begin(window).values():
        tensor.fill_(1.0)
    if restored:
        error_feedback.restored(window)
    return error_feedback


def again(error_feedback: ErrorFeedback) -> ErrorFeedback:
    """Return the error feedback after a restart."""
    other = ErrorFeedback(PARAMETERS, stale_after_windows=5)
    other.load_state_dict(error_feedback.state_dict())
    return other


def holds(error_feedback: ErrorFeedback, window: int) -> bool:
    return all(tensor.all() for tensor in error_feedback.begin(window).values())


@pytest.mark.parametrize("restart", [again, lambda error_feedback: error_feedback])
def test_it_is_kept_until_it_is_stale(restart):
    assert holds(restart(kept(10)), 15)
    assert not holds(restart(kept(10)), 16)


@pytest.mark.parametrize("restart", [again, lambda error_feedback: error_feedback])
def test_an_update_sent_right_before_a_crash_is_not_sent_twice(restart):
    for step, known in ((9, True), (10, True), (11, False)):
        error_feedback = restart(kept(10))
        error_feedback.applied(step)
        assert holds(error_feedback, 12) == known, step


@pytest.mark.parametrize("restart", [again, lambda error_feedback: error_feedback])
def test_an_update_that_was_restored_but_got_through_is_not_sent_twice(restart):
    for step, known in ((9, True), (10, False)):
        error_feedback = restart(kept(10, restored=True))
        error_feedback.applied(step)
        assert holds(error_feedback, 12) == known, step
    error_feedback = kept(10, restored=True)
    error_feedback.begin(11)  # the next window's update is published, and its result known
    error_feedback.applied(11)
    assert holds(error_feedback, 12)


@pytest.mark.parametrize("restart", [again, lambda error_feedback: error_feedback])
@pytest.mark.parametrize("applied", [10, 11])
def test_a_restored_update_that_got_through_is_found_after_later_windows_were_packed(restart, applied):
    error_feedback = kept(10, restored=True)
    error_feedback.begin(11)  # outer_delay 1, and the set of window 10 is late
    error_feedback.restored(11)
    error_feedback.begin(12)
    error_feedback = restart(error_feedback)
    error_feedback.applied(12)
    assert holds(error_feedback, 12)
    error_feedback.applied(applied)
    assert not holds(error_feedback, 12)


def test_a_node_that_never_packed_has_nothing_to_keep():
    error_feedback = ErrorFeedback(PARAMETERS, stale_after_windows=5)
    error_feedback.applied(7)
    assert error_feedback.state_dict() == {"window": None, "taken_back": [], "tensors": {}}


def test_foreign_states_are_refused():
    error_feedback = kept(10)
    state = error_feedback.state_dict()
    for wrong in ({**state, "more": 1}, {**state, "tensors": {"a": torch.ones(3)}}):
        with pytest.raises(StateError, match="error feedback"):
            error_feedback.load_state_dict(wrong)
    assert holds(error_feedback, 10)


@pytest.mark.parametrize("offload", [False, True])
def test_only_the_named_tensors_are_on_the_device_and_changes_stay(offload):
    error_feedback = ErrorFeedback(PARAMETERS, stale_after_windows=5, offload=offload)
    error_feedback.begin(3)
    with error_feedback.on_device(["b"]) as there:
        assert there.keys() == {"b"}
        there["b"] += 1
    assert [one.sum().item() for one in error_feedback.tensors.values()] == [0, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_offloaded_one_is_in_pinned_memory_but_for_the_tensors_at_work():
    parameters = {name: one.cuda() for name, one in PARAMETERS.items()}
    error_feedback = ErrorFeedback(parameters, stale_after_windows=5, offload=True)
    assert all(one.is_pinned() for one in error_feedback.begin(3).values())
    with error_feedback.on_device(["b"]) as there:
        assert there["b"].is_cuda
        there["b"] += 1
    assert error_feedback.tensors["b"].tolist() == [[1, 1], [1, 1]]
    state = error_feedback.state_dict()
    error_feedback.load_state_dict(state)
    assert all(one.is_pinned() for one in error_feedback.tensors.values())


def test_it_is_empty_on_all_ranks_or_on_none():
    """Also on one that owns no tensor: all take part in an expected step, or none."""
    for parameters in (PARAMETERS, {}):
        error_feedback = ErrorFeedback(parameters, stale_after_windows=5)
        assert error_feedback.empty
        error_feedback.begin(10)
        assert not error_feedback.empty
        error_feedback.applied(11)  # sent right before a restart
        assert error_feedback.empty, parameters
