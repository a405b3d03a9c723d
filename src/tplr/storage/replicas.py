"""Replicated stores: requests go round-robin, and fail over to the next store."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from tplr.errors import DataError, StoreError, StoreUnavailable
from tplr.storage.base import ObjectStore
from tplr.storage.retry import with_retry

T = TypeVar("T")

_LONGEST_REST = 60.0  # seconds until a store that keeps failing is tried again


class Replicas:
    """Sends each request to one of several equal stores, with bounded concurrency.

    A store that fails backs off: it is tried last for ``pause_seconds``, doubled with each further failure.

    Args:
        stores: one or more, used round-robin; must stay open.
        concurrency: requests at a time.
        deadline_seconds: for one request, including all its attempts and pauses.
        patience_seconds: for one attempt while another store is left to try.
        pause_seconds: twice the mean pause after all stores have failed; it doubles with each further round.
        first: index of the store that is tried first, modulo their number.
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
        self._failures = dict.fromkeys(range(len(stores)), 0)  # consecutive failures by index of the store
        self._rests_until = dict.fromkeys(range(len(stores)), 0.0)  # in the event loop's time

    async def ask(self, question: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """Return the first result. Only an unavailable store is retried, not one that lacks or denies the object, has
        another one, or contradicts the manifest.

        Raises:
            StoreError, DataError: the last failure, when the deadline has passed or no store is left. Other
                errors are raised at once.
        """
        one_round = partial(self._round, question, self._turn, set[int]())
        self._turn = (self._turn + 1) % len(self.stores)
        async with self._slots:
            return await with_retry(one_round, deadline_seconds=self._deadline, base_seconds=self._pause)

    async def _round(self, question: Callable[[ObjectStore], Awaitable[T]], first: int, hopeless: set[int]) -> T:
        """Try each store that is not ``hopeless``, from ``first`` on."""
        turn = self._order(first, hopeless)
        failure: StoreUnavailable | None = None
        for number in turn:
            try:
                return await self._attempt(number, question, None if number == turn[-1] else self._patience)
            except StoreUnavailable as error:
                failure = error
            except (StoreError, DataError):  # also a truncated copy, or an endpoint that refuses the request
                hopeless.add(number)
                if len(hopeless) == len(self.stores):
                    raise
        assert failure is not None
        raise failure

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
        """Return the indices of the stores to try, from ``first`` on, with those that back off at the end."""
        now = asyncio.get_running_loop().time()
        turn = ((first + i) % len(self.stores) for i in range(len(self.stores)))
        return sorted((number for number in turn if number not in hopeless), key=lambda n: self._rests_until[n] > now)
