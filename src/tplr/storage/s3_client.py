"""One client at a time: lent to calls, made anew when it keeps failing, closed when its last call is done."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from tplr.logging import logger
from tplr.storage.s3_errors import CONNECTION_ERRORS

# A client holds connections and names looked up; what is wrong with those, a new one has not inherited.
FAILURES_IN_A_ROW = 5
# Making one costs a few ten milliseconds of CPU: not at every failure while a server is away.
SECONDS_BETWEEN = 30.0


@dataclass(eq=False)
class _Lent:
    """A client, and how it fares."""

    client: Any
    opened: AbstractAsyncContextManager[Any]
    made_at: float
    users: int = 0
    failures: int = 0


class RefCountedClient:
    """Lends the client that ``open_client`` makes; the first call opens it.

    A call that the server answered, even with a refusal, speaks for the client; one whose connection failed, or that
    was given up, against it.
    """

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._open_client = open_client
        self._lock = asyncio.Lock()
        self._current: _Lent | None = None
        self._retired: set[_Lent] = set()

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        lent = await self._take()
        try:
            yield lent.client
            lent.failures = 0
        except ClientError:
            lent.failures = 0
            raise
        except (*CONNECTION_ERRORS, asyncio.CancelledError):
            lent.failures += 1
            raise
        finally:
            lent.users -= 1
            self._judge(lent)
            if lent in self._retired and not lent.users:
                self._retired.discard(lent)
                await lent.opened.__aexit__(None, None, None)

    async def close(self) -> None:
        """Close everything, also what is still lent; the next call opens a new client."""
        to_close = [*self._retired, *([self._current] if self._current else [])]
        self._current = None
        self._retired.clear()
        for lent in to_close:
            await lent.opened.__aexit__(None, None, None)

    async def _take(self) -> _Lent:
        async with self._lock:
            if self._current is None:
                opened = self._open_client()
                client = await opened.__aenter__()
                self._current = _Lent(client, opened, made_at=asyncio.get_running_loop().time())
            self._current.users += 1
            return self._current

    def _judge(self, lent: _Lent) -> None:
        age = asyncio.get_running_loop().time() - lent.made_at
        if lent is self._current and lent.failures >= FAILURES_IN_A_ROW and age >= SECONDS_BETWEEN:
            logger.info("storage: %d calls failed in a row: connecting anew", lent.failures)
            self._current = None
            self._retired.add(lent)
