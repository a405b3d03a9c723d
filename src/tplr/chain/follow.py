"""Yields an endless stream of block numbers from subscriptions that break, stop, skip and repeat."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from tplr.errors import ChainUnavailable

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Number of block times without a new block after which another node is tried.
STALL_BLOCKS = 5
# Pauses between two attempts to subscribe. The longest bounds the delay of blocks after a node's recovery.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 3.0
# Seconds for the clean-up of a cancelled call, such as closing the connection to a node that no longer answers.
CLOSE_TIMEOUT = 1.0


async def follow(
    subscribe: Callable[[], AsyncGenerator[int, None]],
    recover: Callable[[int | None], Awaitable[None]],
    *,
    block_time: float,
) -> AsyncGenerator[int, None]:
    """Yield every number once, ascending, without gaps, from the first number of a subscription on.

    Args:
        subscribe: opens a subscription; its numbers may skip, repeat and step back, and it may raise
            ``ChainUnavailable``.
        recover: called with the last number after each lost subscription, before the next one.
        block_time: expected seconds between blocks.
    """
    last: int | None = None
    now = asyncio.get_running_loop().time
    first_pause = pause = min(block_time, FIRST_PAUSE_SECONDS)
    while True:
        headers, heard = subscribe(), now()
        try:
            while True:
                # Numbers from before are no news: a node that lags says them for as long as it lags.
                number = await within(heard + STALL_BLOCKS * block_time - now(), anext(headers))
                for missing in range(number if last is None else last + 1, number + 1):
                    last, pause = missing, first_pause
                    yield missing
                    heard = now()
        except (StopAsyncIteration, TimeoutError, ChainUnavailable) as error:
            reason = str(error) or "no new block for too long"
            wait = max(pause, error.retry_after) if isinstance(error, ChainUnavailable) else pause
            logger.warning("no blocks after %s, reconnecting in %.1f s: %s", last, wait, reason)
        finally:
            with suppress(TimeoutError, ChainUnavailable):
                await within(CLOSE_TIMEOUT, headers.aclose())
        await asyncio.sleep(wait)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
        await recover(last)


async def within(seconds: float, coming: Awaitable[T]) -> T:
    """Await ``coming`` with a time limit that holds even if it ignores cancellation.

    Raises:
        TimeoutError: not within ``seconds``.
    """
    task = asyncio.ensure_future(coming)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError(f"no answer in {seconds:.0f} s" if seconds >= 1 else "")
        return task.result()
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT)
        if not task.cancelled():
            task.exception()  # retrieve a late error, so that asyncio does not log it
