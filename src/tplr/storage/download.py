"""Large objects down in parts: each retried alone, what arrived never fetched again, memory bounded.

A download that ends for want of answers (StoreUnavailable), or with its task or process, leaves what has arrived, and
the next one to the same path goes on from there; ``discard_download`` is for who will not call again. Every other end
leaves nothing.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tplr.errors import PreconditionFailed, StoreError, StoreUnavailable
from tplr.schemas import ObjectInfo
from tplr.storage.base import ObjectStore, check_announced, check_match
from tplr.storage.digest import digest_of
from tplr.storage.local_files import disk_errors
from tplr.storage.many import for_each
from tplr.storage.partial import PartialDownload
from tplr.storage.parts import Part
from tplr.storage.progress import Progress, log_progress
from tplr.storage.retry import Retry, retry_until, with_retry

CONCURRENCY = 4
# The default deadline: this, and the size at a speed below which a node can't keep up anyway.
PATIENCE_SECONDS = 60.0
FLOOR = 2**20  # bytes per second


async def download_file(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    max_bytes: int,
    if_match: str | None = None,
    sha256: str | None = None,
    deadline_seconds: float | None = None,
    concurrency: int = CONCURRENCY,
    progress: Progress | None = None,
) -> ObjectInfo:
    """Fetch one version of an object into ``path``, which appears whole and checked, or not at all.

    The bytes are checked against ``sha256`` (64 hex digits), else against the ETag if that is an MD5 or one of
    ``upload_file``'s. Bytes that do not fit are fetched once more. At most ``concurrency`` parts of ``part_bytes``
    (16 MiB, for objects up to 150 GB) are under way, with a few MiB of each in memory; one keeps its place while it
    waits to be retried, so a store that throttles gets fewer requests. One download to a path at a time.

    Args:
        deadline_seconds: for everything; default one minute and the size at 1 MiB/s.
        progress: default says in the log how far a long download is.

    Raises:
        ObjectTooLarge: more than ``max_bytes`` are announced; nothing was fetched.
        PreconditionFailed: not the ETag ``if_match``, replaced meanwhile, or twice other bytes than their digest says.
        StoreUnavailable: not done by the deadline, or the disk is full; the next call goes on from here.
        StoreError: as ``ObjectStore.get``.
    """
    began = asyncio.get_running_loop().time()
    info = await with_retry(lambda: store.head(key), deadline_seconds=deadline_seconds or PATIENCE_SECONDS)
    check_announced(info.size, max_bytes, bucket=store.name, key=key)
    check_match(info, if_match, bucket=store.name)
    seconds = deadline_seconds or PATIENCE_SECONDS + info.size / FLOOR
    download = _Download(
        store=store,
        info=info,
        path=path,
        sha256=sha256,
        retry=retry_until(began + seconds),
        concurrency=concurrency,
        progress=progress or log_progress(f"fetching {key}"),
    )
    # What was damaged on its way is right the second time; what is wrong at its source stays wrong.
    damage = await download.run() and await download.run()
    if damage:
        raise PreconditionFailed(f"these are not the object's bytes: {damage}", bucket=store.name, key=key)
    return info


def discard_download(path: Path) -> None:
    """Remove what an unfinished download to ``path`` left; fine if there is nothing. Blocks."""
    PartialDownload.remove(path)


@dataclass(frozen=True, kw_only=True)
class _Download:
    """One download of one version of an object."""

    store: ObjectStore
    info: ObjectInfo
    path: Path
    sha256: str | None
    retry: Retry
    concurrency: int
    progress: Progress

    async def run(self) -> str | None:
        """Fetch what is missing; returns what is wrong with the bytes, or None once they are in place."""
        with disk_errors(self.store.name, self.info.key):
            partial = await asyncio.to_thread(PartialDownload, self.path, self.info, digest_of(self.info, self.sha256))
            try:
                await self._fetch_missing(partial)
                damage = await asyncio.to_thread(partial.damage)
                await asyncio.to_thread(partial.discard if damage else partial.finish)
            except StoreUnavailable:
                raise
            except StoreError:
                await asyncio.to_thread(partial.discard)
                raise
            finally:
                partial.close()
        return damage

    async def _fetch_missing(self, partial: PartialDownload) -> None:
        done = self.info.size - sum(part.stop - part.start for part in partial.missing)

        async def fetch(part: Part) -> None:
            nonlocal done
            await self.retry(lambda: self._receive(part, partial))
            await asyncio.to_thread(partial.record, part)
            done += part.stop - part.start
            self.progress(done, self.info.size)

        await for_each(partial.missing, fetch, concurrency=self.concurrency)

    async def _receive(self, part: Part, partial: PartialDownload) -> None:
        """Fetch a part, or what an attempt that broke off has left of it."""
        start = partial.reached[part.number]
        if start == part.stop:
            return
        await self.store.receive(
            self.info.key,
            lambda piece: partial.write(part, piece),
            max_bytes=part.stop - start,
            if_match=self.info.etag,
            byte_range=(start, part.stop),
        )
