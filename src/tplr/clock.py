"""The clock of a node: converts blocks to windows, and follows the current window by the chain's blocks."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from tplr.errors import ChainUnavailable


def block_to_window(block: int, blocks_per_window: int) -> int:
    """Return the window that ``block`` belongs to."""
    return block // blocks_per_window


def first_block(window: int, blocks_per_window: int) -> int:
    """Return the first block of ``window``."""
    return window * blocks_per_window


class Tick(NamedTuple):
    """The start of a window. ``missed``: number of windows skipped since the last tick (0 for the first)."""

    window: int
    missed: int


class WindowClock:
    """Determines the current window from the chain's blocks only, never from this machine's wall clock.

    Args:
        blocks: opens a stream of block numbers, such as ``chain.blocks``; repeated and earlier numbers are ignored.
        block_time: expected seconds between blocks.
        monotonic: a monotonic clock in seconds; tests replace it.
    """

    def __init__(
        self,
        blocks: Callable[[], AsyncIterator[int]],
        *,
        blocks_per_window: int,
        block_time: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if blocks_per_window < 1 or block_time <= 0:
            raise ValueError(f"expected positive sizes, got {blocks_per_window=}, {block_time=}")
        self.blocks_per_window = blocks_per_window
        self.block_time = block_time
        self._blocks = blocks
        self._monotonic = monotonic
        self._block: int | None = None
        self._seen_at = 0.0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the blocks until cancelled. Run it in the node's task group, so that its failure ends the node.

        Raises:
            ChainUnavailable: the stream of blocks ended.
        """
        async for block in self._blocks():
            if self._block is None or block > self._block:
                self._block, self._seen_at = block, self._monotonic()
                # Each change gets a new event: a waiter holds the event that was current when it began to wait.
                self._changed.set()
                self._changed = asyncio.Event()
        raise ChainUnavailable("the stream of blocks ended")

    @property
    def block(self) -> int:
        """The newest block seen. Raises ``ChainUnavailable`` before the first one: ``await wait_for_block(0)``."""
        if self._block is None:
            raise ChainUnavailable("no block seen yet: wait_for_block(0) returns with the first one")
        return self._block

    def has_seen(self, number: int) -> bool:
        """Return whether the newest block seen is at least ``number``."""
        return self._block is not None and self._block >= number

    @property
    def window(self) -> int:
        """The window of the newest block seen. Raises ``ChainUnavailable`` before the first one."""
        return block_to_window(self.block, self.blocks_per_window)

    def seconds_left(self) -> float:
        """Return the expected seconds until the window ends; 0 if its end is overdue."""
        end = first_block(self.window + 1, self.blocks_per_window)
        return max(0.0, (end - self.block) * self.block_time - (self._monotonic() - self._seen_at))

    def seconds_since(self, window: int) -> float:
        """Return a lower bound of the seconds since the first block of ``window``; skipped slots add to them.

        Negative for a future window.
        """
        passed = self.block - first_block(window, self.blocks_per_window)
        return passed * self.block_time + (self._monotonic() - self._seen_at)

    def seconds_since_block(self) -> float:
        """Return the seconds since the newest block was seen."""
        return self._monotonic() - self._seen_at

    async def wait_for_block(self, number: int) -> int:
        """Wait until the newest block is at least ``number`` and return it. Has no timeout."""
        while not self.has_seen(number):
            await self._changed.wait()
        return self.block

    async def wait_for_window(self, window: int) -> int:
        """Wait until the current window is at least ``window`` and return it."""
        await self.wait_for_block(first_block(window, self.blocks_per_window))
        return self.window

    async def ticks(self) -> AsyncIterator[Tick]:
        """Yield the current window at once, then the newest window after each change, without end.

        A consumer that takes longer than a window gets the number of missed windows, never a past window.
        """
        last: int | None = None
        while True:
            window = await self.wait_for_window(0 if last is None else last + 1)
            yield Tick(window, 0 if last is None else window - last - 1)
            last = window
