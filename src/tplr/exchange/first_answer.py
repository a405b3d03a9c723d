"""Fetches one object from the first of several buckets that has it, without waiting for buckets that do not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from tplr.errors import PayloadError, StoreError, StoreUnavailable
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, TransferLimits

T = TypeVar("T")

# Seconds until the other buckets are asked if one does not answer; seconds until a request is abandoned.
PATIENCE_SECONDS, ANSWER_SECONDS = 1.0, 4.0


async def find_first(
    stores: Iterable[ObjectStore],
    look: Callable[[ObjectStore], Coroutine[Any, Any, ObjectInfo | None]],
    fetch: Callable[[ObjectStore, ObjectInfo], Awaitable[T | None]],
    speeds: SourceSpeeds,
    *,
    what: str,
) -> T | None:
    """Return the result of ``fetch`` for the fastest of ``stores`` in which ``look`` finds the object.

    Buckets are asked in the order of ``speeds``. If the object is not found within ``PATIENCE_SECONDS``, all remaining
    buckets are asked at once, and the first answer is used. A bucket has ``ANSWER_SECONDS`` to answer; a fetch has the
    transfer time at the lowest allowed speed in addition. A bucket that does not answer counts as failed in ``speeds``.

    Raises:
        StoreError, PayloadError: no bucket returned the object, and this was the last problem.
    """
    clock = asyncio.get_running_loop().time
    problem: StoreError | PayloadError | None = None
    unasked, impatient = speeds.order(stores), clock() + PATIENCE_SECONDS
    looks: dict[asyncio.Task[ObjectInfo | None], tuple[ObjectStore, float]] = {}  # with the time of each request

    def ask(count: int) -> None:
        for store in unasked[:count]:
            looks[asyncio.create_task(look(store))] = store, clock()
        del unasked[:count]

    try:
        while unasked or looks:
            if not looks:
                ask(1)
            until = impatient if unasked else max(began for _, began in looks.values()) + ANSWER_SECONDS
            done, _ = await asyncio.wait(looks, timeout=max(0.0, until - clock()), return_when=asyncio.FIRST_COMPLETED)
            if not done and not unasked:
                problem = StoreUnavailable(f"{what}: no answer in {ANSWER_SECONDS:g} s")
                break
            if not done:
                ask(len(unasked))
            for one in [one for one in looks if one in done]:
                store, began = looks.pop(one)
                try:
                    info = one.result()
                    if info is None:
                        speeds.note_absent(store)
                    elif (found := await in_time(fetch(store, info), store, size=info.size)) is not None:
                        speeds.note(store, size=info.size, seconds=clock() - began)
                        return found
                except (StoreError, PayloadError) as error:
                    speeds.note(store, size=0, seconds=clock() - began)
                    problem = error
    finally:
        for one, (store, began) in looks.items():
            one.cancel()
            if not one.done() and clock() - began >= PATIENCE_SECONDS:
                speeds.note(store, size=0, seconds=clock() - began)
        await asyncio.gather(*looks, return_exceptions=True)
    if problem:
        raise problem
    return None


async def in_time(answer: Awaitable[T], store: ObjectStore, *, size: int) -> T:
    """Await a bucket's answer. Raises StoreUnavailable if it takes longer than at the lowest allowed speed."""
    seconds = ANSWER_SECONDS + size / TransferLimits.download_floor
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer within {seconds:.0f} s", bucket=store.name) from error
