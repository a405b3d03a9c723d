"""Uploads of large objects in parts. Each part is retried alone; memory is bounded.

If an upload ends with StoreUnavailable, or with its task or process, its parts remain in the store, and the next upload
of the same key resumes. If there is no next one, call ``abort_uploads``. After any other error no parts remain.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tplr.concurrency.batches import batches
from tplr.errors import ObjectNotFound, PreconditionFailed, StoreError, StoreUnavailable
from tplr.schemas import ObjectInfo
from tplr.storage.base import ObjectStore, StoredParts, UnfinishedUpload
from tplr.storage.local_files import disk_errors
from tplr.storage.many import for_each
from tplr.storage.parts import PART_RULE, FilePart, cut, multipart_etag
from tplr.storage.progress import ByteCount, Progress, ProgressLog
from tplr.storage.retry import Deadline
from tplr.storage.s3_body import hash_file
from tplr.storage.s3_multipart import S3Multipart

CONCURRENCY = 4
# Up to this many parts, one PUT is faster than five requests or more, and a retry costs little.
ONE_PUT_PARTS = 2
# The default deadline is this plus the size divided by ``FLOOR``, a rate below which a node can't keep up.
PATIENCE_SECONDS = 60.0
FLOOR = 2**17  # bytes per second


async def upload_file(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    sha256s: Sequence[str] | None = None,
    deadline_seconds: float | None = None,
    concurrency: int = CONCURRENCY,
    progress: Progress | None = None,
) -> ObjectInfo:
    """Store a file, in parts if it has more than two; readers see the complete object. One upload of a key at a time.

    Not for objects that are judged by ``last_modified``: servers set it differently after a multipart upload. At most
    ``concurrency`` parts of ``part_bytes`` (16 MiB, for files up to 150 GB) are sent at a time, each with a few MiB in
    memory. A part that waits for its retry keeps its slot, so a throttling store gets fewer requests.

    Args:
        sha256s: digests of the parts of ``cut``, 64 hex digits each, if known: the store checks the parts by them, so
            nothing is hashed here.
        deadline_seconds: for the whole upload; default: one minute plus the size at 128 KiB/s.
        progress: default: log the progress of a long upload.

    Raises:
        StoreUnavailable: not complete by the deadline; the next call resumes.
        StoreError: as ``ObjectStore.put_file``; or the file changed during the upload.
    """
    with disk_errors(store.name, key):
        before = await asyncio.to_thread(path.stat)
    parts = cut(before.st_size)
    seconds = deadline_seconds or PATIENCE_SECONDS + before.st_size / FLOOR
    deadline = Deadline.after(seconds)
    multipart = store.multipart
    if multipart is None or len(parts) <= ONE_PUT_PARTS:
        return await deadline.retry(lambda: store.put_file(key, path))
    begun = await deadline.retry(lambda: _begin(multipart, key))
    upload = _Upload(
        multipart=multipart,
        key=key,
        upload_id=begun.upload_id,
        stored=begun.md5s,
        path=path,
        before=before,
        sha256s=sha256s,
        deadline=deadline,
        done=ByteCount(before.st_size, progress or ProgressLog(f"storing {key}")),
    )
    try:
        with disk_errors(store.name, key):
            await for_each(parts, upload.send, concurrency=concurrency)
            await upload.check_unchanged()
        return await upload.complete(store)
    except StoreUnavailable:
        raise
    except StoreError as error:
        await upload.abort_after(error)
        raise


async def upload_stream(store: ObjectStore, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
    """Store the bytes of ``chunks`` with ``upload_file``, via a temporary file, so that a failed part can be retried.

    Raises:
        StoreError: as ``upload_file``. If ``chunks`` raises, its error is raised and nothing is stored.
    """
    with tempfile.TemporaryDirectory(prefix="tplr-upload-") as folder:
        path = Path(folder) / "body"
        with disk_errors(store.name, key):
            file = await asyncio.to_thread(path.open, "wb")
        with file:
            async for batch in batches(chunks):
                with disk_errors(store.name, key):
                    await asyncio.to_thread(file.writelines, batch)
        return await upload_file(store, key, path)


def etag_of(store: ObjectStore, path: Path) -> str:
    """Return the ETag that ``upload_file`` gives a file in this store. Blocks. Raises OSError."""
    size = path.stat().st_size
    parts = cut(size)
    if store.multipart is None or len(parts) <= ONE_PUT_PARTS:
        return hash_file("md5", path)
    return multipart_etag([hash_file("md5", path, part) for part in parts])


async def abort_uploads(store: ObjectStore, prefix: str = "", *, older_than_seconds: float | None = None) -> int:
    """Abort this bucket's unfinished uploads below ``prefix``; return their number.

    Args:
        older_than_seconds: minimum age of the last stored part by this machine's clock: an upload that got a part since
            then may be running or be resumed. None: abort all.

    Raises:
        StoreError: as ``ObjectStore.delete``.
    """
    multipart = store.multipart
    if multipart is None:
        return 0
    stale = await multipart.unfinished(prefix)
    if older_than_seconds is not None:
        before = time.time() - older_than_seconds
        old = [upload for upload in stale if upload.begun <= before]
        stale = [upload for upload, stored in await list_stored(multipart, old) if stored.last_written <= before]
    await abort_each(multipart, stale)
    return len(stale)


async def abort_each(multipart: S3Multipart, uploads: Iterable[UnfinishedUpload]) -> None:
    """Abort the uploads; no error if one has ended meanwhile. Raises StoreError."""
    for upload in uploads:
        with contextlib.suppress(ObjectNotFound):
            await multipart.abort(upload.key, upload.upload_id)


async def list_stored(
    multipart: S3Multipart, uploads: Iterable[UnfinishedUpload]
) -> list[tuple[UnfinishedUpload, StoredParts]]:
    """Return the uploads that have not ended meanwhile, with what each has stored. Raises StoreError."""

    async def look(upload: UnfinishedUpload) -> list[tuple[UnfinishedUpload, StoredParts]]:
        with contextlib.suppress(ObjectNotFound):
            return [(upload, await multipart.stored(upload))]
        return []

    found = await for_each(uploads, look, concurrency=CONCURRENCY)
    return [one for each in found for one in each]


@dataclass(frozen=True)
class _Begun:
    """A created upload, and the MD5 of each of its stored parts."""

    upload_id: str
    md5s: dict[int, str]


async def _begin(multipart: S3Multipart, key: str) -> _Begun:
    """Return the newest unfinished upload of this key, to resume it, or else begin a new one.

    This also finds an upload whose first response was lost. Parts that differ from the file are sent again.
    """
    mine = [upload for upload in await multipart.unfinished(key) if upload.key == key]
    for older in mine[:-1]:
        with contextlib.suppress(ObjectNotFound):  # listed, but aborted since then by a lifecycle rule
            await multipart.abort(key, older.upload_id)
    if mine:
        newest = mine[-1].upload_id
        with contextlib.suppress(ObjectNotFound):
            return _Begun(newest, await multipart.parts(key, newest))
    return _Begun(await multipart.create(key, metadata=PART_RULE), {})


@dataclass(frozen=True, kw_only=True)
class _Upload:
    """A multipart upload in progress.

    Attributes:
        stored: MD5 of the parts that the store had at the start, by number.
        md5s: MD5 of the parts that it has now, by number.
    """

    multipart: S3Multipart
    key: str
    upload_id: str
    stored: dict[int, str]
    path: Path
    before: os.stat_result
    sha256s: Sequence[str] | None
    deadline: Deadline
    done: ByteCount
    md5s: dict[int, str] = field(default_factory=dict)

    async def send(self, part: FilePart) -> None:
        """Send a part if the store does not have it."""
        found = self.stored.get(part.number)
        if not found or found != await asyncio.to_thread(hash_file, "md5", self.path, part):
            found = await self.deadline.retry(lambda: self._put(part))
        self.md5s[part.number] = found
        self.done.add(part.stop - part.start)

    async def complete(self, store: ObjectStore) -> ObjectInfo:
        """Join the parts to one object. A HEAD decides whether that succeeded, because the response may be lost."""
        problem: StoreError | None = None
        try:
            await self.deadline.retry(lambda: self.multipart.complete(self.key, self.upload_id, self.md5s))
        except (ObjectNotFound, StoreUnavailable) as error:
            problem = error
        try:
            info = await self.deadline.retry(lambda: store.head(self.key))
        except ObjectNotFound as error:
            raise problem or error from error
        if info.etag != multipart_etag([self.md5s[number] for number in sorted(self.md5s)]):
            raise problem or PreconditionFailed("another write replaced it", bucket=store.name, key=self.key)
        return info

    async def abort_after(self, error: StoreError) -> None:
        """Abort the upload; if that fails, add a note to ``error``."""
        try:
            await self.multipart.abort(self.key, self.upload_id)
        except ObjectNotFound:
            pass
        except StoreError as second:
            error.add_note(f"its parts stay in the store: {second}")

    async def _put(self, part: FilePart) -> str:
        # A file that became shorter would keep the store waiting for the rest.
        await self.check_unchanged()
        if self.sha256s is None:
            return await self.multipart.put_part(self.key, self.upload_id, part, self.path)
        sha256 = self.sha256s[part.number - 1]
        try:
            return await self.multipart.put_part(self.key, self.upload_id, part, self.path, sha256)
        except StoreUnavailable:
            # If the file itself is wrong, sending it again does not help.
            if await asyncio.to_thread(hash_file, "sha256", self.path, part) != sha256:
                raise StoreError(f"{self.path}: part {part.number} does not match its digest", key=self.key) from None
            raise

    async def check_unchanged(self) -> None:
        if _identity(await asyncio.to_thread(self.path.stat)) != _identity(self.before):
            raise StoreError(f"{self.path} changed during the upload", key=self.key)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
