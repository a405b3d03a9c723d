"""Retries while a store is unavailable, up to a deadline."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tplr.errors import StoreUnavailable

T = TypeVar("T")


async def with_retry(
    call: Callable[[], Awaitable[T]],
    *,
    deadline_seconds: float,
    base_seconds: float = 0.5,
    cap_seconds: float = 20.0,
    jitter: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Await ``call()``, and repeat it while it raises StoreUnavailable.

    Between attempts it waits a random share of ``min(cap_seconds, base_seconds * 2**attempt)`` ("full jitter",
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), in addition to the store's
    ``retry_after``.

    Args:
        deadline_seconds: from now, for all attempts and waits. At the deadline a running attempt is cancelled. A wait
            that would exceed it is not begun.
        jitter: returns a number in [0, 1).

    Raises:
        StoreUnavailable: the last attempt's; or the first attempt had no response by the deadline.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_seconds
    attempt = 0
    last: StoreUnavailable | None = None
    try:
        while True:
            scope = asyncio.timeout_at(deadline)
            try:
                async with scope:
                    return await call()
            except StoreUnavailable as error:
                last = error
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise last or StoreUnavailable(f"no answer within {deadline_seconds:g} s") from error
            wait = (last.retry_after or 0.0) + jitter() * min(cap_seconds, base_seconds * 2.0 ** min(attempt, 60))
            if loop.time() + wait >= deadline:
                raise last
            await sleep(wait)
            attempt += 1
    finally:
        # The error's traceback refers to this frame. Deleting it breaks the cycle, so the call's buffers are freed.
        last = None


@dataclass(frozen=True)
class Deadline:
    """A time of the running event loop that several calls share."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return a deadline ``seconds`` from now."""
        return cls(asyncio.get_running_loop().time() + seconds)

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call ``with_retry`` with this deadline."""
        return await with_retry(call, deadline_seconds=self.at - asyncio.get_running_loop().time())
