"""Downloads of large objects in parts. Each part is verified and retried alone; memory is bounded.

If a download ends with StoreUnavailable, or with its task or process, its parts remain, and the next download to the
same path resumes. If there is no next one, call ``discard_download``. After any other error no parts remain, except of
a download that resumed: what another source delivered is not lost because this one lacks the object.
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
from tplr.storage.partial import ArrivingPart, PartialDownload, unfinished_file
from tplr.storage.parts import FilePart, cut
from tplr.storage.progress import ByteCount, Progress, ProgressLog
from tplr.storage.retry import Deadline

CONCURRENCY = 4
# The default deadline is this plus the size divided by ``FLOOR``, a rate below which a node can't keep up.
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
    """Fetch an object of ``size`` bytes into ``path``, which is created whole and verified, or not at all.

    At most ``concurrency`` parts of ``part_bytes`` (16 MiB, for objects up to 150 GB) are fetched at a time, each with
    about a MiB in memory. A part that waits for a retry keeps its slot, so a throttling store gets fewer requests. One
    download to a path at a time.

    Args:
        blake3s: digests of the parts of ``cut``, 64 hex digits each. A part that differs is fetched a second time.
        if_match: ETag; default: that of the first response. All parts are of one version.
        deadline_seconds: for the whole download; default: one minute plus the size at 1 MiB/s.
        progress: default: log the progress of a long download.

    Raises:
        PreconditionFailed: the object has another size or ETag, or a part has another digest twice.
        StoreUnavailable: not complete by the deadline, or the disk is full; the next call resumes.
        StoreError: as ``ObjectStore.get``.
    """
    seconds = deadline_seconds or PATIENCE_SECONDS + size / FLOOR
    deadline = Deadline.after(seconds)
    expected = dict(zip(cut(size), blake3s, strict=True))
    with disk_errors(store.name, key):
        unfinished = await asyncio.to_thread(PartialDownload, path, size)
        try:
            download = _Download(
                store=store,
                key=key,
                size=size,
                etag=if_match,
                expected=expected,
                partial=unfinished,
                deadline=deadline,
                fetched=ByteCount(size, progress or ProgressLog(f"fetching {key}")),
            )
            await for_each(expected, download.fetch, concurrency=concurrency)
            await asyncio.to_thread(unfinished.finish)
        except StoreUnavailable:
            raise
        except StoreError:
            if not unfinished.resumed:
                await asyncio.to_thread(unfinished.discard)
            raise
        finally:
            unfinished.close()


def discard_download(path: Path) -> None:
    """Remove the file of an unfinished download to ``path``, if there is one. Blocks."""
    unfinished_file(path).unlink(missing_ok=True)


@dataclass(kw_only=True)
class _Download:
    """One download of one version of an object.

    Attributes:
        etag: None until the first response.
        expected: BLAKE3 of each part.
    """

    store: ObjectStore
    key: str
    size: int
    etag: str | None
    expected: dict[FilePart, str]
    partial: PartialDownload
    deadline: Deadline
    fetched: ByteCount

    async def fetch(self, part: FilePart) -> None:
        """Fetch a part if the file does not have it."""
        there = self.partial.resumed and await asyncio.to_thread(self.partial.holds, part, self.expected[part])
        if not there:
            await self._fetch_part(part, self.expected[part])
        self.fetched.add(part.stop - part.start)

    async def _fetch_part(self, part: FilePart, blake3: str) -> None:
        found = ""
        for _ in range(2):  # damage in transit is rarely repeated
            arriving = ArrivingPart(part, self.partial)
            await self.deadline.retry(partial(self._receive, arriving))
            if (found := arriving.blake3()) == blake3:
                return
        damage = f"these are not the object's bytes: BLAKE3 of part {part.number} is {found}, expected {blake3}"
        raise PreconditionFailed(damage, bucket=self.store.name, key=self.key)

    async def _receive(self, arriving: ArrivingPart) -> None:
        """Fetch the rest of a part: the whole part, or the bytes missing after a broken connection."""
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
