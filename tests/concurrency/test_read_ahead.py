"""``ReadAheadBuffer``: when work is submitted, the order of results, and the effect of errors and interrupts."""

from concurrent.futures import Future

import pytest

from tplr.concurrency.read_ahead import ReadAhead


class Submitted(dict[int, "Future[int]"]):
    """Futures by item, which the test completes."""

    def __call__(self, item: int) -> "Future[int]":
        return self.setdefault(item, Future())

    def finish(self, *items: int) -> None:
        for item in items:
            self[item].set_result(10 * item)


def test_results_come_in_order_and_depth_bounds_what_is_submitted():
    submitted = Submitted()
    ahead = ReadAhead(range(5), submitted, depth=3)
    assert list(submitted) == []
    ahead.fill()
    ahead.fill()
    assert list(submitted) == [0, 1, 2]
    assert [item for item, _ in ahead.pending] == [0, 1, 2]
    submitted.finish(2, 1, 0)
    for item in range(3):
        got, future = next(ahead)
        assert (got, future.result()) == (item, 10 * item)
    assert list(submitted) == [0, 1, 2, 3, 4]  # the one taken last is not refilled before the next call
    submitted.finish(3, 4)
    assert [item for item, _ in ahead] == [3, 4]
    assert next(ahead, None) is None


def test_unordered_results_come_as_they_are_done():
    submitted = Submitted()
    ahead = ReadAhead(range(4), submitted, depth=3, ordered=False)
    ahead.fill()
    submitted.finish(2)
    assert next(ahead)[0] == 2
    submitted.finish(1, 0)
    assert [next(ahead)[0], next(ahead)[0]] == [1, 0]
    submitted.finish(3)
    assert [item for item, _ in ahead] == [3]


@pytest.mark.parametrize("ordered", [True, False])
def test_lazy_submits_one_item_a_call_while_a_result_is_ready(ordered):
    done = []

    def submit(item):
        done.append(item)
        future = Future()
        future.set_result(item)
        return future

    ahead = ReadAhead(range(10), submit, depth=4, ordered=ordered, lazy=True)
    assert next(ahead)[0] == 0
    assert done == [0]
    submitted = Submitted()
    ahead = ReadAhead(range(10), submitted, depth=4, ordered=ordered, lazy=True)
    ahead.fill()
    assert list(submitted) == [0, 1, 2, 3]


def test_a_failure_is_its_items_alone():
    submitted = Submitted()
    ahead = ReadAhead(range(3), submitted, depth=3)
    ahead.fill()
    submitted[0].set_exception(ValueError("item 0"))
    submitted.finish(1, 2)
    with pytest.raises(ValueError, match="item 0"):
        next(ahead)[1].result()
    assert [future.result() for _, future in ahead] == [10, 20]


def test_an_interrupt_while_an_item_is_made_loses_nothing():
    steps = iter([0, KeyboardInterrupt(), 1, None])

    def make():
        step = next(steps)
        if isinstance(step, BaseException):
            raise step
        return step

    submitted = Submitted()
    ahead = ReadAhead(iter(make, None), submitted, depth=2)
    with pytest.raises(KeyboardInterrupt):
        ahead.fill()
    ahead.fill()
    submitted.finish(0, 1)
    assert [item for item, _ in ahead] == [0, 1]


def test_closing_cancels_what_was_not_returned():
    submitted = Submitted()
    ahead = ReadAhead(range(3), submitted, depth=2)
    ahead.fill()
    submitted.finish(0)
    next(ahead)
    ahead.close()
    assert submitted[1].cancelled()
