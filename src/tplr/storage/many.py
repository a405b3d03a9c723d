"""Operations on many objects: bounded concurrency, and listing and deleting with retries."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from tplr.schemas import ObjectInfo
from tplr.storage.base import ObjectStore
from tplr.storage.retry import with_retry

T = TypeVar("T")
R = TypeVar("R")

DELETE_SECONDS = 60.0
DELETE_CONCURRENCY = 16


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[R]], *, concurrency: int) -> list[R]:
    """Await ``work(item)`` for every item, started in order, at most ``concurrency`` at once; return results in order.

    The first error cancels the others and is raised itself, not in an exception group.
    """
    queue, results = enumerate(items), dict[int, R]()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_work_queue(queue, work, results))
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [results[i] for i in range(len(results))]


async def _work_queue(queue: Iterator[tuple[int, T]], work: Callable[[T], Awaitable[R]], results: dict[int, R]) -> None:
    for i, item in queue:
        results[i] = await work(item)


async def list_objects(store: ObjectStore, prefix: str, *, deadline_seconds: float = 60.0) -> list[ObjectInfo]:
    """Call ``ObjectStore.list``, retried for up to ``deadline_seconds``. Raises StoreError."""
    return await with_retry(lambda: store.list(prefix), deadline_seconds=deadline_seconds)


async def delete_many(store: ObjectStore, keys: Iterable[str]) -> None:
    """Delete every key; missing keys are no error. Each is retried until ``DELETE_SECONDS`` after its start.

    Sends single requests: R2 charges nothing for them, and its DeleteObjects does not accept every client's checksums.

    Raises:
        StoreError: a key was not deleted; others may have been.
    """

    async def delete(key: str) -> None:
        await with_retry(lambda: store.delete(key), deadline_seconds=DELETE_SECONDS)

    await for_each(keys, delete, concurrency=DELETE_CONCURRENCY)
