"""Stores that hold the same objects: each question goes to the next one, and on to another when it fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tplr.errors import AccessDenied, ObjectNotFound, StoreUnavailable
from tplr.storage.base import ObjectStore
from tplr.storage.retry import with_retry

T = TypeVar("T")


class Replicas:
    """Asks one of several equal stores, a bounded number of questions at a time.

    Args:
        stores: one or more, asked in turn; open for as long as this is used.
        concurrency: how many questions may be under way at once.
        deadline_seconds: how long one question may take, all its attempts and the pauses between them together.
        pause_seconds: mean pause after a first failure is half of it; it doubles with each further one.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        *,
        concurrency: int = 8,
        deadline_seconds: float = 60.0,
        pause_seconds: float = 0.5,
    ) -> None:
        if not stores or concurrency < 1:
            raise ValueError(f"expected a store and a concurrency of 1 or more, got {len(stores)} and {concurrency}")
        self._stores = tuple(stores)
        self._slots = asyncio.Semaphore(concurrency)
        self._deadline = deadline_seconds
        self._pause = pause_seconds
        self._turn = 0

    async def ask(self, question: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """The first answer. A store that lacks the object, or denies it, is not asked again.

        Raises:
            StoreError: the last failure, when the deadline has passed or no store is left. Others pass at once.
        """
        first = self._turn % len(self._stores)
        self._turn += 1
        left = [*self._stores[first:], *self._stores[:first]]

        async def attempt() -> T:
            while True:
                store = left.pop(0)
                try:
                    return await question(store)
                except (ObjectNotFound, AccessDenied):
                    if not left:
                        raise
                except StoreUnavailable:
                    left.append(store)
                    raise

        async with self._slots:
            return await with_retry(attempt, deadline_seconds=self._deadline, base_seconds=self._pause)
