"""Fetches one object from whichever of several buckets has it, and waits for none that does not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from tplr.errors import PayloadError, StoreError, StoreUnavailable
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, TransferLimits

T = TypeVar("T")

# Until the other buckets are asked, too, if one does not answer; and until one is given up.
PATIENCE_SECONDS, ANSWER_SECONDS = 1.0, 4.0


async def find_first(
    stores: Iterable[ObjectStore],
    look: Callable[[ObjectStore], Coroutine[Any, Any, ObjectInfo | None]],
    fetch: Callable[[ObjectStore, ObjectInfo], Awaitable[T | None]],
    speeds: SourceSpeeds,
    *,
    what: str,
) -> T | None:
    """What ``fetch`` returns for the fastest of ``stores`` in which ``look`` finds it; raises only if none has it.

    If it is not found within ``PATIENCE_SECONDS``, all others are asked at once, and the first answer is taken; nobody
    is waited for longer than ``ANSWER_SECONDS``, and for the object as long again as it takes at the lowest allowed
    speed. A silent one counts as failed in ``speeds``.
    """
    clock = asyncio.get_running_loop().time
    problem: StoreError | PayloadError | None = None
    unasked, impatient = speeds.order(stores), clock() + PATIENCE_SECONDS
    looks: dict[asyncio.Task[ObjectInfo | None], tuple[ObjectStore, float]] = {}  # and when each was asked

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
    """The answer of a bucket. Raises StoreUnavailable if it takes longer than at the lowest allowed speed."""
    seconds = ANSWER_SECONDS + size / TransferLimits.download_floor
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer within {seconds:.0f} s", bucket=store.name) from error
