"""Large objects down in parts: each checked and retried alone, what arrived never fetched again, memory bounded.

A download that ends for want of answers (StoreUnavailable), or with its task or process, leaves what has arrived, and
the next one to the same path goes on from there; ``discard_download`` is for who will not call again. Every other end
leaves nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tplr.errors import PreconditionFailed, StoreError, StoreUnavailable
from tplr.storage.base import ObjectStore, check_match
from tplr.storage.local_files import disk_errors
from tplr.storage.many import for_each
from tplr.storage.partial import ArrivingPart, PartialDownload
from tplr.storage.parts import FilePart, cut
from tplr.storage.progress import Progress, log_progress
from tplr.storage.retry import Retry, retry_until

CONCURRENCY = 4
# The default deadline: this, and the size at a speed below which a node can't keep up anyway.
PATIENCE_SECONDS = 60.0
FLOOR = 2**20  # bytes per second


async def download_file(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    size: int,
    blake3s: Sequence[str],
    if_match: str | None = None,
    deadline_seconds: float | None = None,
    concurrency: int = CONCURRENCY,
    progress: Progress | None = None,
) -> None:
    """Fetch an object of ``size`` bytes into ``path``, which appears whole and checked, or not at all.

    At most ``concurrency`` parts of ``part_bytes`` (16 MiB, for objects up to 150 GB) are under way, with a little over
    a MiB of each in memory; one keeps its place while it waits to be retried, so a store that throttles gets fewer
    requests. One download to a path at a time.

    Args:
        blake3s: of each part that ``cut`` gives, 64 hex digits. A part that does not fit is fetched once more.
        if_match: ETag; default is that of the first answer. All that comes is of one version.
        deadline_seconds: for everything; default one minute and the size at 1 MiB/s.
        progress: default says in the log how far a long download is.

    Raises:
        PreconditionFailed: another size or ETag, replaced meanwhile, or a part that was twice not what its digest says.
        StoreUnavailable: not done by the deadline, or the disk is full; the next call goes on from here.
        StoreError: as ``ObjectStore.get``.
    """
    seconds = deadline_seconds or PATIENCE_SECONDS + size / FLOOR
    retry = retry_until(asyncio.get_running_loop().time() + seconds)
    expected = dict(zip(cut(size), blake3s, strict=True))
    with disk_errors(store.name, key):
        unfinished = await asyncio.to_thread(PartialDownload, path, size)
        try:
            download = _Download(store=store, key=key, size=size, etag=if_match, partial=unfinished, retry=retry)
            await download.fetch(expected, concurrency, progress or log_progress(f"fetching {key}"))
            await asyncio.to_thread(unfinished.finish)
        except StoreUnavailable:
            raise
        except StoreError:
            await asyncio.to_thread(unfinished.discard)
            raise
        finally:
            unfinished.close()


def discard_download(path: Path) -> None:
    """Remove what an unfinished download to ``path`` left; fine if there is nothing. Blocks."""
    PartialDownload.remove(path)


@dataclass(kw_only=True)
class _Download:
    """One download of one version of an object; ``etag`` is None until a store has said it."""

    store: ObjectStore
    key: str
    size: int
    etag: str | None
    partial: PartialDownload
    retry: Retry

    async def fetch(self, expected: dict[FilePart, str], concurrency: int, progress: Progress) -> None:
        """Fetch every part that is not there as its digest says."""
        done = 0

        async def fetch(part: FilePart) -> None:
            nonlocal done
            there = self.partial.resumed and await asyncio.to_thread(self.partial.holds, part, expected[part])
            if not there:
                await self._fetch_part(part, expected[part])
            done += part.stop - part.start
            progress(done, self.size)

        await for_each(expected, fetch, concurrency=concurrency)

    async def _fetch_part(self, part: FilePart, blake3: str) -> None:
        found = ""
        for _ in range(2):  # what was damaged on its way is right the second time
            arriving = ArrivingPart(part, self.partial)
            await self.retry(partial(self._receive, arriving))
            if (found := arriving.blake3()) == blake3:
                return
        damage = f"these are not the object's bytes: BLAKE3 of part {part.number} is {found}, expected {blake3}"
        raise PreconditionFailed(damage, bucket=self.store.name, key=self.key)

    async def _receive(self, arriving: ArrivingPart) -> None:
        """Fetch a part, or what an attempt that broke off has left of it."""
        start, stop = arriving.reached, arriving.part.stop
        if start == stop:
            return
        info = await self.store.receive(
            self.key, arriving.write, max_bytes=stop - start, if_match=self.etag, byte_range=(start, stop)
        )
        self.etag = self.etag or info.etag
        check_match(info, self.etag, bucket=self.store.name)
        if info.size != self.size:
            raise PreconditionFailed(
                f"the object has {info.size} bytes, expected {self.size}", bucket=self.store.name, key=self.key
            )
