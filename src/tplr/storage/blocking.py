"""Reads objects of S3 and R2 from synchronous code: runs the storage layer on an event loop in its own thread."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any, Self, TypeVar

from tplr.config import BucketLocation, Environment
from tplr.errors import DataError, PreconditionFailed
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, S3Connections
from tplr.storage.aws import aws_location
from tplr.storage.ranged_file import RangedFile
from tplr.storage.retry import with_retry
from tplr.urls import StoreKey, check_version, fixed_prefix, key_matches, store_key, version_of

R = TypeVar("R")
_JOIN_SECONDS = 10.0


class BucketConnections:
    """Connections of one pipeline; a context manager that owns the event loop, its thread and its tasks.

    A bucket named by the environment's ``R2_…`` variables is read with their credentials, any other bucket with those
    that ``aws_location`` finds.
    """

    def __init__(self) -> None:
        self.retries = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tplr-data-stores", daemon=True)
        self._stack = AsyncExitStack()
        self._connections: dict[tuple[str | None, str], S3Connections] = {}
        self._stores: dict[str, ObjectStore] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_JOIN_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    @cached_property
    def environment(self) -> Environment:
        """The environment of this pipeline, read at the first request for an object of a bucket."""
        return Environment.read()

    def submit(self, work: Coroutine[Any, Any, R]) -> "Future[R]":
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def store(self, bucket: str) -> ObjectStore:
        """Return the bucket's store. Raises ConfigError as ``aws_location``."""
        if bucket not in self._stores:
            location = self.environment.location(bucket)
            if location is None:
                location = await asyncio.to_thread(aws_location, bucket, self.environment.variables)
            self._stores[bucket] = await self.connect(location)
        return self._stores[bucket]

    async def connect(self, location: BucketLocation) -> ObjectStore:
        """Return the store of the bucket at ``location``."""
        place = (location.endpoint, location.region)
        if place not in self._connections:
            connections = self._connections[place] = S3Connections(
                location.endpoint, https=self.environment.https, region=location.region
            )
            await self._stack.enter_async_context(connections)
        return self._connections[place].store(location.bucket, location.renew)

    async def retry(self, call: Callable[[], Awaitable[R]], timeout: float) -> R:
        """Call ``with_retry``, and count the retries."""
        return await with_retry(call, deadline_seconds=timeout, sleep=self._pause)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.retries += 1

    def matches(self, url: str, timeout: float) -> list[str]:
        """Return the URLs of all objects that match a pattern, ascending. Raises FileNotFoundError if there is none."""
        place = store_key(url)

        async def listing() -> list[ObjectInfo]:
            store = await self.store(place.bucket)
            return await self.retry(lambda: store.list(fixed_prefix(place.key)), timeout)

        head = url[: len(url) - len(place.key)]
        found = [head + info.key for info in self.submit(listing()).result() if key_matches(place.key, info.key)]
        if not found:
            raise FileNotFoundError(f"{url}: no object matches")
        return found

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._stack.aclose()
        await self._loop.shutdown_default_executor()


class StoreObject:
    """One object, read range by range. All ranges must have the ETag of the first one, or that of ``version``.

    Raises, when read:
        DataError: the object does not have ``version``, or it changed.
        StoreError: as ``ObjectStore.get_piece``; StoreUnavailable only after ``timeout`` seconds of retries.
    """

    def __init__(self, stores: BucketConnections, url: str, timeout: float, version: str = "") -> None:
        self._stores = stores
        self._url = url
        self._place: StoreKey = store_key(url)
        self._timeout = timeout
        self._expected = version
        self._info: ObjectInfo | None = None

    async def info(self) -> ObjectInfo:
        if self._info is None:
            store = await self._stores.store(self._place.bucket)
            info = await self._stores.retry(lambda: store.head(self._place.key), self._timeout)
            self._note(info)
            return info
        return self._info

    async def get(self, start: int, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` from ``start`` on; fewer at the end, and none after it."""
        if self._info is not None and start >= self._info.size:
            return b""
        store = await self._stores.store(self._place.bucket)
        etag = self._info.etag if self._info else self._expected.partition(":")[2] or None
        try:
            info, data = await self._stores.retry(
                lambda: store.get_piece(self._place.key, start, max_bytes, if_match=etag), self._timeout
            )
        except PreconditionFailed as error:
            if self._info is None and start >= (await self.info()).size:
                return b""
            raise DataError(f"{self._url}: the object changed while it was read") from error
        self._note(info)
        return data

    async def version(self) -> str:
        info = await self.info()
        return version_of(info.size, info.etag)

    def _note(self, info: ObjectInfo) -> None:
        if self._info is None:
            check_version(self._url, self._expected, version_of(info.size, info.etag))
        self._info = info


def open_ranged(stores: BucketConnections, url: str, timeout: float, version: str) -> tuple[RangedFile, str]:
    """Open an object as a file; each read is one request for exactly its bytes. Raises as ``StoreObject``.

    Returns:
        The file and its version.
    """
    remote = StoreObject(stores, url, timeout, version)
    info = stores.submit(remote.info()).result()
    file = RangedFile(info.size, lambda start, stop: stores.submit(remote.get(start, stop - start)).result())
    return file, version_of(info.size, info.etag)
