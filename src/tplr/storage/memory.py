"""An object store in memory, for tests and simulations."""

import asyncio
import io
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import BinaryIO, TypeVar

from tplr.errors import ObjectNotFound
from tplr.schemas import ObjectInfo
from tplr.storage.base import already_there, whole_seconds
from tplr.storage.local_store import LocalStore
from tplr.storage.parts import md5_hex

T = TypeVar("T")


class MemoryStore(LocalStore):
    """An ``ObjectStore`` in a dictionary. Every call yields to other tasks, like a network call.

    Args:
        name: name of the bucket in errors.
        clock: returns the unix seconds for ``last_modified``.
    """

    def __init__(self, name: str = "memory", *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(name)
        self._clock = clock
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        await asyncio.sleep(0)
        return function(*arguments)

    def _open(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        if key not in self._objects:
            raise ObjectNotFound("no such object", bucket=self.name, key=key)
        info, data = self._objects[key]
        return replace(info, metadata=dict(info.metadata)), io.BytesIO(data)

    def _keys(self, prefix: str) -> Iterable[str]:
        return self._objects

    def _put(self, key: str, source: BinaryIO, metadata: dict[str, str], create_only: bool) -> ObjectInfo:
        if create_only and key in self._objects:
            raise already_there(self.name, key)
        data = source.read()
        modified = whole_seconds(self._clock())
        info = ObjectInfo(key=key, size=len(data), etag=md5_hex(data), last_modified=modified, metadata=metadata)
        self._objects[key] = (info, data)
        return replace(info, metadata=dict(metadata))

    def _remove(self, key: str) -> None:
        self._objects.pop(key, None)
