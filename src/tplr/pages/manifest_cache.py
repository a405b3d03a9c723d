"""Caches dataset manifests on the local disk, for all processes of a machine."""

import asyncio
import contextlib
import fcntl
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tplr.disk_cache import DiskCache
from tplr.logging import logger
from tplr.schemas import Bucket
from tplr.seeds import hash_parts
from tplr.storage.s3 import endpoint_url

LOCK_PATIENCE_SECONDS = 30.0  # after this a process fetches without the lock, because the holder may be suspended
_LOCK_POLL_SECONDS = 0.02
_MAX_BYTES = 2**30


def dataset_place(buckets: Sequence[Bucket], subfolder: str, endpoint: str | None = None) -> tuple[str, ...]:
    """Return the identity of a dataset before any read: its subfolder, then each replica's endpoint and bucket."""
    return (subfolder, *(f"{endpoint_url(bucket, endpoint)}/{bucket.name}" for bucket in buckets))


@dataclass(frozen=True)
class ManifestCopy:
    """The bytes of ``_metadata.yaml`` and ``_shard_sizes.json``, and the ETags of both objects."""

    etags: tuple[str, str]
    metadata: bytes
    shard_sizes: bytes


class ManifestCache:
    """The cached manifest of one dataset.

    In addition to the ``DiskCache`` that stores it, it has a lock: if many processes start at once, only one fetches
    the manifest, which may have 64 MiB.

    Args:
        folder: parent of the cache's folder, shared with other datasets.
        place: the dataset, from ``dataset_place``.
    """

    def __init__(self, folder: Path, place: Sequence[str]) -> None:
        self._key = hash_parts("manifest", *place)
        self._cache = DiskCache(folder / "manifests", max_bytes=_MAX_BYTES)
        self._lock = folder / "manifests" / f"{self._key}.lock"

    def read(self) -> ManifestCopy | None:
        """Return the cached manifest, or None. Blocks."""
        data = self._cache.read(self._key)
        if data is None:
            return None
        line, _, objects = data.partition(b"\n")
        header = json.loads(line)
        length = header["metadata_bytes"]
        return ManifestCopy(tuple(header["etags"]), objects[:length], objects[length:])

    def write(self, copy: ManifestCopy) -> None:
        """Cache ``copy`` in place of an older one. Blocks."""
        header = {"etags": copy.etags, "metadata_bytes": len(copy.metadata)}
        self._cache.write(self._key, json.dumps(header).encode() + b"\n" + copy.metadata + copy.shard_sizes)

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Admit one process or task at a time to the block; after ``LOCK_PATIENCE_SECONDS``, enter without the lock.

        The lock only saves fetches: readers always see a complete copy. A dead process holds no lock.
        """
        try:
            file = await asyncio.to_thread(self._open_lock)
        except OSError as error:
            logger.warning("no lock for the cached manifest: %s", error)
            yield
            return
        with file:
            loop = asyncio.get_running_loop()
            give_up = loop.time() + LOCK_PATIENCE_SECONDS
            while loop.time() < give_up:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL_SECONDS)
                except OSError as error:  # a network's file system may have no locks
                    logger.warning("no lock for the cached manifest: %s", error)
                    break
            yield

    def _open_lock(self) -> BinaryIO:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        return self._lock.open("wb")
