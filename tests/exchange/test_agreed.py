"""The answer of most electors: no needless requests, and no waiting for a slow elector."""

import asyncio
from typing import Any

import pytest

from tplr.chain.electors import Elector, Electors
from tplr.errors import ObjectNotFound, PayloadError, StoreUnavailable
from tplr.exchange import agreed as agreed_module
from tplr.exchange.agreed import agreed, enough

ELECTORS = Electors(tuple(Elector(uid, f"key-{uid}", stake) for uid, stake in enumerate((30, 25, 20, 15, 10))))


class Answers:
    """The answer of each elector: a value, an error, or None for no answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[int] = []

    async def __call__(self, uid: int) -> Any:
        self.asked.append(uid)
        answer = self.answers[uid]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_module, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(agreed_module, "ANSWER_SECONDS", 0.2)


def test_as_many_are_asked_as_are_needed() -> None:
    assert enough(ELECTORS, ELECTORS.uids) == [0, 1]
    assert enough(ELECTORS, [4, 3, 2, 1, 0]) == [4, 3, 2, 1]
    assert enough(ELECTORS, [2, 3, 4], known=[0, 1]) == []


async def test_the_first_ones_are_enough_if_they_say_the_same() -> None:
    ask = Answers("x", "x", "y", "y", "y")
    assert await agreed(ELECTORS, ask) == "x"
    assert ask.asked == [0, 1]


@pytest.mark.parametrize("first", ["y", StoreUnavailable("down"), PayloadError("bomb"), None])
async def test_the_others_are_asked_if_the_largest_lies_fails_or_hangs(first: Any) -> None:
    ask = Answers(first, "x", "x", "x", "y")
    assert await agreed(ELECTORS, ask) == "x"
    assert sorted(ask.asked) == [0, 1, 2, 3, 4]


async def test_without_a_majority_there_is_no_answer() -> None:
    assert await agreed(ELECTORS, Answers("x", "y", "z", "x", "y")) is None
    assert await agreed(Electors(()), Answers()) is None


async def test_what_kept_a_majority_from_being_found_is_raised() -> None:
    with pytest.raises(ObjectNotFound):
        await agreed(ELECTORS, Answers("x", ObjectNotFound("nothing"), "y", "x", "y"))
    with pytest.raises(StoreUnavailable, match="no answer within"):
        await agreed(ELECTORS, Answers(None, None, "y", "x", "y"))


async def test_a_lie_does_not_hide_that_a_later_attempt_may_succeed() -> None:
    """A caller that only catches temporary errors would stop."""
    with pytest.raises(StoreUnavailable):
        await agreed(ELECTORS, Answers(PayloadError("lie"), StoreUnavailable("down"), "x", "y", "x"))
    with pytest.raises(PayloadError):
        await agreed(ELECTORS, Answers(PayloadError("lie"), PayloadError("lie"), "x", "y", "x"))


async def test_a_silent_elector_is_named_if_its_answer_could_decide() -> None:
    """Otherwise a few electors that don't answer would stop readers that retry until there is an answer."""
    missing, silent = ObjectNotFound("deleted"), StoreUnavailable("throttled")
    with pytest.raises(StoreUnavailable):
        await agreed(ELECTORS, Answers("x", missing, missing, silent, silent))
    with pytest.raises(StoreUnavailable):
        await agreed(ELECTORS, Answers(silent, missing, silent, silent, missing))
    with pytest.raises(ObjectNotFound):
        await agreed(ELECTORS, Answers(missing, missing, silent, silent, silent))
    assert await agreed(ELECTORS, Answers("x", "y", "z", "z", silent)) is None


async def test_who_cannot_decide_any_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node looks at each window without a report, so a silent elector would delay each of them."""
    monkeypatch.setattr(agreed_module, "ANSWER_SECONDS", 1e6)
    missing = ObjectNotFound("not written yet")
    async with asyncio.timeout(20):
        with pytest.raises(ObjectNotFound):
            await agreed(ELECTORS, Answers(None, missing, missing, missing, missing))
        assert await agreed(ELECTORS, Answers("x", "y", "z", "z", None)) is None


async def test_answers_are_compared_by_what_matters() -> None:
    ask = Answers((1, "a"), (1, "b"), (2, "c"), (2, "d"), (2, "e"))
    assert await agreed(ELECTORS, ask, key=lambda one: one[0]) == (1, "a")
