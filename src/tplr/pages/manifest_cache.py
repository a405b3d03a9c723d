"""Keeps a dataset's manifest on the local disk, for all processes of a machine.

One file holds both objects, their ETags and a hash over everything: it is whole, and the right dataset's, or it counts
as absent.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tplr.errors import StateError
from tplr.files import atomic_write
from tplr.logging import logger
from tplr.schemas import Bucket
from tplr.storage.s3 import endpoint_url

LOCK_PATIENCE_SECONDS = 30.0  # then a process fetches for itself: the one with the lock may be stopped
_LOCK_POLL_SECONDS = 0.02
_HASH_BYTES = 32


def dataset_place(buckets: Sequence[Bucket], subfolder: str, endpoint: str | None = None) -> tuple[str, ...]:
    """What tells datasets apart before anything is read: the subfolder, then endpoint and bucket of each replica."""
    return (subfolder, *(f"{endpoint_url(bucket, endpoint)}/{bucket.name}" for bucket in buckets))


@dataclass(frozen=True)
class ManifestCopy:
    """The bytes of ``_metadata.yaml`` and ``_shard_sizes.json``, and the ETags of the objects they are of."""

    etags: tuple[str, str]
    metadata: bytes
    shard_sizes: bytes


class ManifestCache:
    """The kept manifest of one dataset.

    A folder that can't be read or written costs a warning, and the manifest is fetched each time.

    Args:
        folder: of this and other datasets; made when something is kept.
        place: the dataset, as ``dataset_place`` gives it.
    """

    def __init__(self, folder: Path, place: Sequence[str]) -> None:
        self._place = [*place]
        name = hashlib.sha256(json.dumps(self._place).encode()).hexdigest()[:32]
        self._path = folder / f"manifest-{name}.bin"

    def read(self) -> ManifestCopy | None:
        """What is kept; None if that is nothing, torn, damaged or another dataset's. Blocks."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the kept manifest %s can't be read: %s", self._path, error)
            return None
        body = data[_HASH_BYTES:]
        if hashlib.sha256(body).digest() != data[:_HASH_BYTES]:
            logger.warning("the kept manifest %s is damaged: it is fetched again", self._path)
            return None
        line, _, objects = body.partition(b"\n")
        header = json.loads(line)
        if header["place"] != self._place:
            return None
        length = header["metadata_bytes"]
        return ManifestCopy(tuple(header["etags"]), objects[:length], objects[length:])

    def write(self, copy: ManifestCopy) -> None:
        """Keep ``copy`` in place of what was kept. Blocks."""
        header = {"place": self._place, "etags": copy.etags, "metadata_bytes": len(copy.metadata)}
        body = json.dumps(header).encode() + b"\n" + copy.metadata + copy.shard_sizes
        try:
            atomic_write(self._path, hashlib.sha256(body).digest() + body)
        except StateError as error:
            logger.warning("the manifest is not kept: %s", error)

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Other processes and tasks wait, for some time, until the block has ended; a dead process holds no lock.

        Only saves them the fetching: without it too, a reader sees one whole copy or another.
        """
        try:
            file = await asyncio.to_thread(self._open_lock)
        except OSError as error:
            logger.warning("no lock beside the kept manifest: %s", error)
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
            yield

    def _open_lock(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.with_suffix(".lock").open("wb")
