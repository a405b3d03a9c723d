"""A semaphore that grants slots in ticket order."""

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator


class OrderedSemaphore:
    """Grants slots to work that is announced in order but becomes ready in any order.

    turn = slots.turn()                 # announce
    ...                                 # prepare
    async with slots.slot(turn): ...    # granted before any later turn that waits too
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._turns = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def turn(self) -> int:
        """Return the next ticket."""
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
                if given.done() and not given.cancelled():  # granted and cancelled in the same iteration of the loop
                    self._pass_on_slot()
                raise
        try:
            yield
        finally:
            self._pass_on_slot()

    def _pass_on_slot(self) -> None:
        while self._waiting:
            _, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
