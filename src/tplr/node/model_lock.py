"""Who may use the model: training, which gives it back between two inner steps when others wait, or one of them."""

import asyncio
from contextlib import AbstractAsyncContextManager


class ModelLock(AbstractAsyncContextManager["ModelLock", None]):
    """A lock that is granted in the order of requests, and whose holder sees that others wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    def wanted(self) -> bool:
        """Whether somebody waits for the model. Any thread may ask."""
        return self._waiting > 0

    async def __aenter__(self) -> "ModelLock":
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
