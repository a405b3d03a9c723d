"""What is kept unsent, for how long, and when it must not be sent again."""

import pytest
import torch

from tplr.errors import StateError
from tplr.training.outer.unsent import Unsent

PARAMETERS = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}


def kept(window: int, *, taken_back: bool = False) -> Unsent:
    """Ones, from ``window``."""
    unsent = Unsent(PARAMETERS, stale_after_windows=5)
    for tensor in unsent.begin(window).values():
        tensor.fill_(1.0)
    if taken_back:
        unsent.taken_back()
    return unsent


def again(unsent: Unsent) -> Unsent:
    """After a restart."""
    other = Unsent(PARAMETERS, stale_after_windows=5)
    other.load_state_dict(unsent.state_dict())
    return other


def holds(unsent: Unsent, window: int) -> bool:
    return all(tensor.all() for tensor in unsent.begin(window).values())


@pytest.mark.parametrize("restart", [again, lambda unsent: unsent])
def test_it_goes_on_until_it_is_stale(restart):
    assert holds(restart(kept(10)), 15)
    assert not holds(restart(kept(10)), 16)


@pytest.mark.parametrize("restart", [again, lambda unsent: unsent])
def test_an_update_sent_right_before_a_crash_is_not_sent_twice(restart):
    for step, known in ((9, True), (10, True), (11, False)):
        unsent = restart(kept(10))
        unsent.applied(step)
        assert holds(unsent, 12) == known, step


@pytest.mark.parametrize("restart", [again, lambda unsent: unsent])
def test_an_update_that_was_taken_back_but_got_through_is_not_sent_twice(restart):
    for step, known in ((9, True), (10, False)):
        unsent = restart(kept(10, taken_back=True))
        unsent.applied(step)
        assert holds(unsent, 12) == known, step
    unsent = kept(10, taken_back=True)
    unsent.begin(11)  # the next window's is out, and known
    unsent.applied(11)
    assert holds(unsent, 12)


def test_a_node_that_never_packed_has_nothing_to_keep():
    unsent = Unsent(PARAMETERS, stale_after_windows=5)
    unsent.applied(7)
    assert unsent.state_dict() == {"window": None, "taken_back": False, "tensors": {}}


def test_foreign_states_are_refused():
    unsent = kept(10)
    state = unsent.state_dict()
    for wrong in ({**state, "more": 1}, {**state, "tensors": {"a": torch.ones(3)}}):
        with pytest.raises(StateError, match="unsent"):
            unsent.load_state_dict(wrong)
    assert holds(unsent, 10)
