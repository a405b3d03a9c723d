"""A lock on the model: training holds it, and releases it between two inner steps if another task waits for it."""

import asyncio
from contextlib import AbstractAsyncContextManager


class ModelLock(AbstractAsyncContextManager["ModelLock", None]):
    """A lock that is granted in the order of requests, and whose holder can see whether other tasks wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    def wanted(self) -> bool:
        """Return whether a task waits for the model. Thread-safe."""
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
