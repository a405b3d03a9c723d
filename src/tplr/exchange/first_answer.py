"""Fetches one object from the first of several buckets that has it, without waiting for buckets that do not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from tplr.errors import PayloadError, StoreError, StoreUnavailable
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, TransferLimits

T = TypeVar("T")

# Seconds until the other buckets are asked if one does not answer; seconds until a request is abandoned.
PATIENCE_SECONDS, ANSWER_SECONDS = 1.0, 4.0


async def find_first(
    stores: Mapping[str, ObjectStore],
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

    A fetch is given up earlier if it is much slower than another bucket, which can still be asked, has been. Each one
    that is given up doubles the time of the next, because this node's own link may be slow; they are tried again, at
    the lowest allowed speed, if no other bucket returned the object.

    Args:
        stores: by owner, as in ``speeds``.

    Raises:
        StoreError, PayloadError: no bucket returned the object, and this was the last problem.
    """
    clock = asyncio.get_running_loop().time
    search = _Search(stores, look, fetch, speeds)
    impatient = clock() + PATIENCE_SECONDS
    try:
        while search.unasked or search.looks:
            if not search.looks:
                search.ask(1)
            began = max(began for _, began in search.looks.values())
            until = impatient if search.unasked else began + ANSWER_SECONDS
            left = max(0.0, until - clock())
            done, _ = await asyncio.wait(search.looks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done and not search.unasked:
                search.problem = StoreUnavailable(f"{what}: no answer in {ANSWER_SECONDS:g} s")
                break
            if not done:
                search.ask(len(search.unasked))
            for one in [one for one in search.looks if one in done]:
                if (found := await search.use(one)) is not None:
                    return found
        for owner, info in search.given_up:
            if (found := await search.take(owner, info, clock(), TransferLimits.download_floor)) is not None:
                return found
    finally:
        await search.end()
    if search.problem:
        raise search.problem
    return None


class _Search(Generic[T]):
    """The state of one ``find_first``; arguments as there.

    Attributes:
        unasked: owners that were not asked yet, in order.
        looks: owner and time of each request that was not used yet.
        given_up: owners that were too slow, with the object's description.
        problem: the last one.
    """

    def __init__(
        self,
        stores: Mapping[str, ObjectStore],
        look: Callable[[ObjectStore], Coroutine[Any, Any, ObjectInfo | None]],
        fetch: Callable[[ObjectStore, ObjectInfo], Awaitable[T | None]],
        speeds: SourceSpeeds,
    ) -> None:
        self.unasked = speeds.order(stores)
        self.looks: dict[asyncio.Task[ObjectInfo | None], tuple[str, float]] = {}
        self.given_up: list[tuple[str, ObjectInfo]] = []
        self.problem: StoreError | PayloadError | None = None
        self._stores = stores
        self._look = look
        self._fetch = fetch
        self._speeds = speeds
        self._clock = asyncio.get_running_loop().time

    def ask(self, count: int) -> None:
        """Look for the object at the next owners."""
        for owner in self.unasked[:count]:
            self.looks[asyncio.create_task(self._look(self._stores[owner]))] = owner, self._clock()
        del self.unasked[:count]

    async def use(self, look: asyncio.Task[ObjectInfo | None]) -> T | None:
        """Fetch the object that a finished request has found; None if there is none, or its owner is too slow."""
        owner, began = self.looks.pop(look)
        try:
            info = look.result()
        except (StoreError, PayloadError) as error:
            self._note_problem(owner, error, began)
            return None
        if info is None:
            self._speeds.note_absent(owner)
            return None
        # Only a bucket that is still to be asked, or has already answered, can take over.
        others = [*self.unasked, *(other for task, (other, _) in self.looks.items() if task.done())]
        speed = self._speeds.expected(others) / 2 ** len(self.given_up)
        before = self.problem
        found = await self.take(owner, info, began, max(speed, TransferLimits.download_floor))
        late = self.problem is not before and isinstance(self.problem, StoreUnavailable)
        if late and speed > TransferLimits.download_floor:
            self.given_up.append((owner, info))
        return found

    async def take(self, owner: str, info: ObjectInfo, began: float, speed: float) -> T | None:
        """Fetch an object, at ``speed`` bytes per second at least; None, and a ``problem``, if that fails."""
        try:
            found = await in_time(self._fetch(self._stores[owner], info), self._stores[owner], info.size, speed)
        except (StoreError, PayloadError) as error:
            self._note_problem(owner, error, began)
            return None
        # A source that describes an object and has none counts as failed: else it would be asked first every time.
        self._speeds.note(owner, size=0 if found is None else info.size, seconds=self._clock() - began)
        return found

    async def end(self) -> None:
        """Cancel the requests that still run."""
        for look, (owner, began) in self.looks.items():
            look.cancel()
            if not look.done() and self._clock() - began >= PATIENCE_SECONDS:
                self._speeds.note(owner, size=0, seconds=self._clock() - began)
        await asyncio.gather(*self.looks, return_exceptions=True)

    def _note_problem(self, owner: str, error: StoreError | PayloadError, began: float) -> None:
        self._speeds.note(owner, size=0, seconds=self._clock() - began)
        self.problem = error


async def in_time(
    answer: Awaitable[T], store: ObjectStore, size: int, speed: float = TransferLimits.download_floor
) -> T:
    """Await a bucket's answer. Raises StoreUnavailable if it takes longer than at ``speed`` bytes per second."""
    seconds = ANSWER_SECONDS + size / speed
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer within {seconds:.0f} s", bucket=store.name) from error
