"""Failures scripted per store: which replicas are asked, how often, and the result."""

import asyncio

import pytest

from tplr.errors import AccessDenied, DataError, ObjectNotFound, StoreUnavailable
from tplr.storage import MemoryStore
from tplr.storage.replicas import Replicas


def scripted(**outcomes: list):
    """A scripted request; each store returns its outcomes in order, and repeats the last one."""
    asked = []

    async def question(store):
        asked.append(store.name)
        script = outcomes[store.name]
        outcome = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return question, asked


def replicas(*names: str, **arguments) -> Replicas:
    return Replicas(
        [MemoryStore(name) for name in names], **{"deadline_seconds": 5, "pause_seconds": 0.001} | arguments
    )


DOWN, GONE, DENIED = StoreUnavailable("down"), ObjectNotFound("gone"), AccessDenied("denied")


async def test_stores_take_turns():
    question, asked = scripted(a=[1], b=[2])
    both = replicas("a", "b")
    assert [await both.ask(question) for _ in range(4)] == [1, 2, 1, 2]
    assert asked == ["a", "b", "a", "b"]


async def test_a_failure_goes_on_to_the_next_store_and_comes_back():
    question, asked = scripted(a=[DOWN, 1], b=[DOWN, 2])
    assert await replicas("a", "b").ask(question) == 1
    assert asked == ["a", "b", "a"]


async def test_a_store_that_lacks_the_object_is_not_asked_again():
    question, asked = scripted(a=[GONE], b=[DOWN, DOWN, 2])
    assert await replicas("a", "b").ask(question) == 2
    assert asked == ["a", "b", "b", "b"]


@pytest.mark.parametrize("final", [GONE, DENIED, DataError("contradiction")])
async def test_what_no_repetition_mends_is_raised_at_once(final):
    question, asked = scripted(a=[final])
    with pytest.raises(type(final)) as caught:
        await replicas("a").ask(question)
    assert caught.value is final
    assert asked == ["a"]


async def test_a_store_that_fails_rests_and_takes_its_turns_again():
    question, asked = scripted(a=[DOWN, DOWN, 1], b=[2], c=[3])
    three = replicas("a", "b", "c", pause_seconds=0.05)
    assert [await three.ask(question) for _ in range(5)] == [2, 2, 3, 2, 2]
    assert asked == ["a", "b", "b", "c", "b", "b"]  # a is skipped in its turns
    await asyncio.sleep(0.06)
    asked.clear()
    assert [await three.ask(question) for _ in range(2)] == [3, 2]  # asked again, and it rests twice as long
    await asyncio.sleep(0.11)
    assert [await three.ask(question) for _ in range(3)] == [2, 3, 1]
    assert asked == ["c", "a", "b", "b", "c", "a"]


async def test_a_store_that_hangs_costs_its_patience_only_where_there_is_another():
    async def question(store):
        await asyncio.sleep(60 if store.name == "a" else 0)
        return store.name

    pair = replicas("a", "b", patience_seconds=0.02, pause_seconds=5)
    assert [await pair.ask(question) for _ in range(3)] == ["b", "b", "b"]
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.05 s"):
        await replicas("a", patience_seconds=0.02, deadline_seconds=0.05).ask(question)


async def test_what_contradicts_the_manifest_in_one_store_may_be_right_in_another():
    question, asked = scripted(a=[DataError("stale")], b=[2])
    assert await replicas("a", "b").ask(question) == 2
    question, asked = scripted(a=[DataError("stale")], b=[GONE])
    with pytest.raises(ObjectNotFound):
        await replicas("a", "b").ask(question)
    assert asked == ["a", "b"]


async def test_what_is_truncated_or_too_large_in_one_store_is_read_from_another():
    stores = [MemoryStore(name) for name in "abc"]
    for store, body in zip(stores, (b"ab", b"abcd", b"abcdefgh"), strict=True):
        await store.put("file", body)
    three = Replicas(stores)
    for _ in stores:  # each comes first once
        assert await three.ask(lambda store: store.get("file", max_bytes=8, byte_range=(0, 4))) == b"abcd"
    for _ in stores:
        assert await three.ask(lambda store: store.get("file", max_bytes=4)) in (b"ab", b"abcd")


async def test_patience_ends_with_the_last_failure():
    question, asked = scripted(a=[DOWN])
    with pytest.raises(StoreUnavailable, match="down"):
        await replicas("a", deadline_seconds=0.05).ask(question)
    assert len(asked) > 1


async def test_a_question_without_an_answer_ends_too():
    async def forever(store):
        await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable, match="no answer within"):
        await replicas("a", deadline_seconds=0.05).ask(forever)


async def test_questions_under_way_are_bounded_and_waiting_costs_no_patience():
    running, most = 0, 0

    async def question(store):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1

    two_slots = replicas("a", concurrency=2, deadline_seconds=0.2)
    await asyncio.gather(*(two_slots.ask(question) for _ in range(16)))  # 0.4 s in all, twice the patience of one
    assert most == 2


def test_nothing_to_ask():
    with pytest.raises(ValueError, match="expected a store"):
        Replicas([])
