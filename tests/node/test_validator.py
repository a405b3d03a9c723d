"""A window that can't be gathered changes no score, and the validator continues."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tplr.clock import Tick
from tplr.errors import WindowLost
from tplr.hparams import load_hparams
from tplr.node.replica import NodeContext, Replica
from tplr.node.validator import Validator
from tplr.node.window_time import WindowTime
from tplr.telemetry import Telemetry
from tplr.telemetry.events import Event

LOST = 7


class Clock:
    """Three windows, the first of which completes ``LOST``."""

    block = 0

    def __init__(self, offset: int) -> None:
        self._first = LOST + offset

    async def ticks(self) -> AsyncIterator[Tick]:
        for window in range(self._first, self._first + 3):
            yield Tick(window, 0)


class Lost:
    """A replica that finds no window's updates anywhere, as one does when they were deleted after their set came."""

    train_state = SimpleNamespace(start_window=0)
    folder = Path("nowhere")

    def __init__(self) -> None:
        self.window = LOST
        self.times = WindowTime()
        self.asked: list[int] = []
        self.advanced: list[int] = []

    def register(self, name: str, part: object) -> None:
        pass

    async def open(self, start_window: int) -> None:
        pass

    async def advance(self, until: int) -> None:
        self.advanced.append(until)
        self.window = until

    async def gather(self) -> None:
        self.asked.append(self.window)
        raise WindowLost(f"window {self.window}: uids [3] are in its included set, and their updates can't be had")


async def nothing(_: int) -> None:
    pass


async def test_a_window_that_is_lost_is_reported_and_changes_no_score() -> None:
    events: list[Event] = []
    hparams = load_hparams()
    clock, electors = SimpleNamespace(block=0), frozenset()
    comms = SimpleNamespace(uid=1, clock=clock, electors=electors, copy_run=nothing)
    context = NodeContext(
        comms=cast(Any, comms),
        clock=cast(Any, Clock(hparams.validator_offset)),
        telemetry=Telemetry(role="validator", uid=1, listeners=(events.append,)),
    )
    replica = Lost()
    validator = Validator(cast(Replica, replica), cast(Any, None), context, hparams)
    await validator._follow(cast(Any, SimpleNamespace(create_task=lambda paying: paying.close())))
    # How to go on, by a later checkpoint if there is one, is the way that ``advance`` knows.
    assert replica.advanced == replica.asked == [LOST, LOST + 1, LOST + 2]
    problems = [event for event in events if event["event"] != "window_time"]
    assert [event["event"] for event in problems] == ["problem"] * 3
    assert f"window {LOST}: uids [3]" in problems[0]["text"]
    assert validator._board.peer_scores == {}
