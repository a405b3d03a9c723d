"""A bounded number at a time, and of those that wait the one that came first of all to the queue, ready or not."""

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator


class OrderedSemaphore:
    """Slots for work that is announced in order and becomes ready in any.

    turn = slots.turn()                 # announced
    ...                                 # made ready
    async with slots.slot(turn): ...    # before all that were announced later and wait as well
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._turns = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def turn(self) -> int:
        """A place in the order."""
        self._turns += 1
        return self._turns

    @contextlib.asynccontextmanager
    async def slot(self, turn: int) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            given = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (turn, given))
            try:
                await given
            except asyncio.CancelledError:
                if given.done() and not given.cancelled():  # given and cancelled in one moment
                    self._give_on()
                raise
        try:
            yield
        finally:
            self._give_on()

    def _give_on(self) -> None:
        while self._waiting:
            _, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
