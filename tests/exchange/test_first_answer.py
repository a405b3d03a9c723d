"""Sources that delay a fetch without having the object; the tests of aggregates and updates have the other cases."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tplr.exchange import first_answer
from tplr.exchange.first_answer import find_first
from tplr.exchange.source_speeds import SourceSpeeds


async def test_who_answers_late_that_it_has_nothing_does_not_delay_every_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_answer, "PATIENCE_SECONDS", 0.2)
    stores: list[Any] = [SimpleNamespace(name=name) for name in ("empty-1", "empty-2", "empty-3", "good")]
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
