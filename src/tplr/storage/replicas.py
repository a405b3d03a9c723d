"""Stores that hold the same objects: each question goes to the next one, and on to another when it fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tplr.errors import AccessDenied, DataError, ObjectNotFound, StoreUnavailable
from tplr.storage.base import ObjectStore
from tplr.storage.retry import with_retry

T = TypeVar("T")

_LONGEST_REST = 60.0  # seconds until a store that keeps failing is asked again


class Replicas:
    """Asks one of several equal stores, a bounded number of questions at a time.

    A store that fails rests: it comes last until ``pause_seconds`` have passed, twice as long after each further
    failure, and takes its turns again then.

    Args:
        stores: one or more, asked in turn; open for as long as this is used.
        concurrency: how many questions may be under way at once.
        deadline_seconds: how long one question may take, all its attempts and the pauses between them together.
        patience_seconds: how long one attempt may take while there is another store to ask.
        pause_seconds: mean pause after all stores failed is half of it; it doubles with each further round.
        first: number of the store that is asked first; counted round the stores.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        *,
        concurrency: int = 8,
        deadline_seconds: float = 60.0,
        patience_seconds: float = 10.0,
        pause_seconds: float = 0.5,
        first: int = 0,
    ) -> None:
        if not stores or concurrency < 1:
            raise ValueError(f"expected a store and a concurrency of 1 or more, got {len(stores)} and {concurrency}")
        self.stores = tuple(stores)
        self._slots = asyncio.Semaphore(concurrency)
        self._deadline = deadline_seconds
        self._patience = patience_seconds
        self._pause = pause_seconds
        self._turn = first % len(self.stores)
        self._failures = dict.fromkeys(range(len(stores)), 0)  # in a row, of the store with this number
        self._rests_until = dict.fromkeys(range(len(stores)), 0.0)  # in the event loop's time

    async def ask(self, question: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """The first answer. A store that lacks the object, denies it or contradicts the manifest is not asked again.

        Raises:
            StoreError, DataError: the last failure, when the deadline has passed or no store is left. What no other
                store could mend passes at once.
        """
        first = self._turn
        self._turn = (self._turn + 1) % len(self.stores)
        hopeless: set[int] = set()

        async def one_round() -> T:
            turn = self._order(first, hopeless)
            failure: StoreUnavailable | None = None
            for number in turn:
                try:
                    return await self._attempt(number, question, None if number == turn[-1] else self._patience)
                except (ObjectNotFound, AccessDenied, DataError):
                    hopeless.add(number)
                    if len(hopeless) == len(self.stores):
                        raise
                except StoreUnavailable as error:
                    failure = error
            assert failure is not None
            raise failure

        async with self._slots:
            return await with_retry(one_round, deadline_seconds=self._deadline, base_seconds=self._pause)

    async def _attempt(self, number: int, question: Callable[[ObjectStore], Awaitable[T]], patience: float | None) -> T:
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(patience)
        try:
            async with scope:
                answer = await question(self.stores[number])
        except (StoreUnavailable, TimeoutError) as error:
            if isinstance(error, TimeoutError) and not scope.expired():
                raise
            rest = min(_LONGEST_REST, self._pause * 2.0 ** min(self._failures[number], 30))
            self._failures[number] += 1
            self._rests_until[number] = loop.time() + rest
            if isinstance(error, TimeoutError):
                bucket = self.stores[number].name
                raise StoreUnavailable(f"no answer within {patience:g} s", bucket=bucket) from error
            raise
        self._failures[number], self._rests_until[number] = 0, 0.0
        return answer

    def _order(self, first: int, hopeless: set[int]) -> list[int]:
        """The numbers of the stores worth asking, from ``first`` on, those that rest last."""
        now = asyncio.get_running_loop().time()
        turn = ((first + i) % len(self.stores) for i in range(len(self.stores)))
        return sorted((number for number in turn if number not in hopeless), key=lambda n: self._rests_until[n] > now)
