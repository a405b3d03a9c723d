"""Clocks for an embedded chain: real time, or virtual time that tests advance."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time in Unix seconds, and sleep."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time, shared by all processes of a machine."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class ManualClock:
    """Virtual time for chains in one process: only ``advance`` changes it, so hours pass in milliseconds."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._moved = asyncio.Event()
        self._sleepers = 0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward and wake all sleepers that are due."""
        self._now += seconds
        self._moved.set()
        self._moved = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        until = self._now + seconds
        self._sleepers += 1
        try:
            while self._now < until:
                await self._moved.wait()
        finally:
            self._sleepers -= 1

    async def drive(self, awaitable: Awaitable[T], *, step: float = 12.0) -> T:
        """Await ``awaitable``, and advance time by ``step`` whenever a task sleeps."""
        task = asyncio.ensure_future(awaitable)
        pause = 0.002
        try:
            while not task.done():
                # Real time for the threads that access the file. An awaitable that takes long is computing. Each chain
                # reads every new block, so more blocks would slow it down.
                await asyncio.wait([task], timeout=pause)
                if self._sleepers:
                    self.advance(step)
                    pause = min(1.2 * pause, 0.02)
            return task.result()
        finally:
            task.cancel()
