"""Decisions that a node has read: how many it keeps, and which ones it drops."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tplr.chain.manager import REMEMBERED_WINDOWS
from tplr.comms.decisions import Decisions
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.ballots import Value

VOIDED, NOW = 100, 250


class Node(Decisions):
    """Reads decisions with one update each; the one after the next of ``VOIDED`` voids it."""

    def __init__(self) -> None:
        self._version = "1"
        self._clock = SimpleNamespace(window=NOW)
        self.requests = 0

    @property
    def clock(self) -> Any:
        return self._clock

    async def _decision_reader(self, window: int) -> Any:
        async def look() -> Value:
            self.requests += 1
            included = (Included(uid=1, sha256="0" * 64, size=1),)
            found = IncludedSet(window=window, version="1", included=included, skipped={}, success_rate=1.0)
            return Value(included=found, peers=None, voided=(VOIDED,) if window == VOIDED + 2 else ())

        return SimpleNamespace(look=look)


async def included(node: Node, window: int) -> int:
    found = await node.get_included(window)
    assert found is not None
    return len(found.included)


async def test_an_old_window_stays_void_for_who_has_read_many_later_ones() -> None:
    """After a rollback to a checkpoint that may be a hundred windows old."""
    node = Node()
    assert await included(node, VOIDED) == 0
    for window in range(NOW - REMEMBERED_WINDOWS, NOW):
        assert await included(node, window) == 1
    assert [await included(node, window) for window in range(VOIDED - 3, VOIDED + 3)] == [1, 1, 1, 0, 1, 1]


async def test_what_is_read_again_is_remembered_and_the_rest_is_bounded() -> None:
    node = Node()
    for window in range(NOW - 2 * REMEMBERED_WINDOWS, NOW):
        await included(node, window)
    assert len(node._decisions) == REMEMBERED_WINDOWS
    before = node.requests
    assert await included(node, NOW - 1) == 1
    assert node.requests == before


async def test_who_begins_to_read_a_decision_does_not_hide_that_another_has_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second task waits for the chain until the first has the decision that voids a window."""
    node, read = Node(), asyncio.Event()
    await node.get_decision(VOIDED)
    reader = await node._decision_reader(VOIDED + 2)

    async def late(window: int) -> Any:
        await read.wait()
        return reader

    with monkeypatch.context() as patch:
        patch.setattr(node, "_decision_reader", late)
        second = asyncio.create_task(node.get_decision(VOIDED + 2))
        await asyncio.sleep(0)
    await node.get_decision(VOIDED + 2)
    assert node.is_voided(VOIDED)
    requests = node.requests
    read.set()
    await second
    assert (node.is_voided(VOIDED), node.requests) == (True, requests)
