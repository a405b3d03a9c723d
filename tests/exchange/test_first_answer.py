"""Sources that delay a fetch without having the object; the tests of aggregates and updates have the other cases."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tplr.errors import StoreUnavailable
from tplr.exchange import first_answer
from tplr.exchange.first_answer import find_first
from tplr.exchange.source_speeds import TOO_SLOW, SourceSpeeds
from tplr.storage import TransferLimits


async def test_who_answers_late_that_it_has_nothing_does_not_delay_every_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_answer, "PATIENCE_SECONDS", 0.2)
    stores: dict[str, Any] = {name: SimpleNamespace(name=name) for name in ("empty-1", "empty-2", "empty-3", "good")}
    asked: list[str] = []

    async def look(store: Any) -> Any:
        asked.append(store.name)
        if store.name == "good":
            return SimpleNamespace(size=10)
        await asyncio.sleep(0.15)
        return None

    async def fetch(store: Any, _: Any) -> str:
        return store.name

    speeds = SourceSpeeds()
    assert await find_first(stores, look, fetch, speeds, what="object") == "good"
    assert asked == ["empty-1", "empty-2", "empty-3", "good"]  # the last two together, after 0.2 s
    for _ in range(3):  # each shows one of them
        asked.clear()
        assert await find_first(stores, look, fetch, speeds, what="object") == "good"
    assert asked == ["good"]


class Slow:
    """Buckets that all have an object of 100 MB; those in ``hanging`` send no byte of it."""

    def __init__(self, hanging: set[str]) -> None:
        self.hanging = hanging
        self.stores: dict[str, Any] = {name: SimpleNamespace(name=name) for name in ("new", "honest", "other")}
        self.fetched: list[str] = []

    async def look(self, _: Any) -> Any:
        return SimpleNamespace(size=10**8)

    async def fetch(self, store: Any, _: Any) -> str:
        self.fetched.append(store.name)
        if store.name in self.hanging:
            await asyncio.Event().wait()
        return store.name

    async def find(self, speeds: SourceSpeeds) -> str | None:
        async with asyncio.timeout(20.0):  # at the lowest allowed speed a fetch may take 100 s
            return await find_first(self.stores, self.look, self.fetch, speeds, what="object")


async def test_who_is_much_slower_than_others_have_been_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validator that was never asked comes first, and sends as slowly as it can without being refused."""
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.1)
    speeds, sources = SourceSpeeds(), Slow({"new"})
    speeds.note("honest", size=10**10, seconds=1.0)
    speeds.note("other", size=10**9, seconds=1.0)
    assert await sources.find(speeds) == "honest"
    assert sources.fetched == ["new", "honest"]
    assert await sources.find(speeds) == "honest"  # the other one is asked last from then on
    assert sources.fetched == ["new", "honest", "honest"]


async def test_the_error_of_a_source_is_not_the_next_ones_delay() -> None:
    """A source whose object is of no use is not asked again, as one that was too slow would be."""
    speeds, sources = SourceSpeeds(), Slow(set())
    for name in sources.stores:
        speeds.note(name, size=10**9, seconds=1.0)
    fetched: list[str] = []

    async def fetch(store: Any, _: Any) -> None:
        fetched.append(store.name)
        if store.name == "new":
            raise StoreUnavailable("down")

    with pytest.raises(StoreUnavailable, match="down"):
        await find_first(sources.stores, sources.look, fetch, speeds, what="object")
    assert fetched == ["new", "honest", "other", "new"]


async def test_on_a_link_that_became_slow_each_bucket_has_more_time_than_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No bucket is as fast as it was: at last, one that was given up is asked again, at the lowest allowed speed."""
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.1)
    speeds, sources = SourceSpeeds(), Slow({"new", "honest", "other"})
    limits: list[float] = []
    in_time = first_answer.in_time

    async def noted(answer: Any, store: Any, size: int, speed: float) -> Any:
        limits.append(size / speed)
        if len(limits) == 4:
            sources.hanging.clear()
        return await in_time(answer, store, min(size, 10**5), speed)

    monkeypatch.setattr(first_answer, "in_time", noted)
    for name in sources.stores:
        speeds.note(name, size=10**9, seconds=1.0)
    assert await sources.find(speeds) == "new"
    assert sources.fetched == ["new", "honest", "other", "new"]
    lowest = 10**8 / TransferLimits.download_floor
    assert limits == [10**8 / (10**9 / TOO_SLOW), 2 * 10**8 / (10**9 / TOO_SLOW), lowest, lowest]
