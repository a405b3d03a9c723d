"""Compares a dataset or a token store with its manifest: every file's size, bytes and, for pages, row groups."""

import asyncio
import hashlib
from dataclasses import dataclass

from tplr.errors import DataError, StoreError
from tplr.pages.manifest import DatasetManifest, ParquetShard
from tplr.pages.page_draw import ROWS_PER_PAGE
from tplr.pages.reader import fetch_footer
from tplr.schemas import ObjectInfo
from tplr.storage.base import ObjectStore
from tplr.storage.download import FLOOR, PATIENCE_SECONDS
from tplr.storage.many import for_each
from tplr.storage.progress import ByteCount, Progress
from tplr.storage.retry import with_retry
from tplr.stores.expected_files import ExpectedFile, ExpectedFiles, expected_files, list_prefix

FILES_AT_ONCE = 4
_FOOTER_GUESS = 64 * 1024


@dataclass(frozen=True)
class VerificationReport:
    """The result of ``verify``.

    Attributes:
        problems: one line each; empty if all files match the manifest.
        unlisted: paths of present files that no manifest names; harmless.
        unhashed: paths for which the manifest gives no hash.
        manifest: that of a dataset of pages, if it could be read.
    """

    files: int
    bytes: int
    problems: tuple[str, ...]
    unlisted: tuple[str, ...] = ()
    unhashed: tuple[str, ...] = ()
    manifest: DatasetManifest | None = None


async def verify(
    store: ObjectStore, prefix: str, *, hashes: bool = True, progress: Progress | None = None
) -> VerificationReport:
    """Check all files below ``prefix``; use ``local_prefix`` for a local folder.

    Args:
        hashes: read every byte; otherwise sizes and row groups only.
        progress: called with the bytes that have been hashed.

    Raises:
        StoreError: the prefix can't be listed, or its manifest can't be read.
    """
    there = await with_retry(lambda: list_prefix(store, prefix), deadline_seconds=PATIENCE_SECONDS)
    try:
        expected = await with_retry(lambda: expected_files(store, prefix, there), deadline_seconds=PATIENCE_SECONDS)
    except DataError as error:
        return VerificationReport(0, 0, (str(error),))
    problems = {file.path: problem for file in expected.files if (problem := file.mismatch(there))}
    sound = [file for file in expected.files if file.path not in problems]
    shards = {shard.path: shard for config in expected.configs for shard in config.shards}
    total = sum(there[file.path].size for file in sound)
    hashed = ByteCount(total, progress)

    async def look_at(file: ExpectedFile) -> None:
        key, info = f"{prefix}/{file.path}", there[file.path]
        try:
            found = await _sha256(store, key, info, hashed) if hashes and file.sha256 else file.sha256
            if found != file.sha256:
                problems[file.path] = f"{file.path}: its SHA-256 is {found}, the manifest says {file.sha256}"
            elif file.path in shards:
                await _check_footer(store, key, info, shards[file.path])
        except (DataError, StoreError) as error:
            problems[file.path] = str(error)

    await for_each(sound, look_at, concurrency=FILES_AT_ONCE)
    listed = {*expected.manifests, *(file.path for file in expected.files)}
    return VerificationReport(
        files=len(expected.files),
        bytes=total,
        problems=(*_too_short(expected), *(problems[path] for path in sorted(problems))),
        unlisted=tuple(sorted(there.keys() - listed)),
        unhashed=tuple(file.path for file in expected.files if file.sha256 is None),
        manifest=expected.dataset,
    )


def _too_short(expected: ExpectedFiles) -> list[str]:
    """Return a problem for each config with too few rows for any page: a draw that selects it fails."""
    return [
        f"config {config.name!r} has {config.num_rows} rows; pages need at least {ROWS_PER_PAGE + 2}"
        for config in expected.configs
        if config.num_rows < ROWS_PER_PAGE + 2
    ]


async def _sha256(store: ObjectStore, key: str, info: ObjectInfo, hashed: ByteCount) -> str:
    """Compute the SHA-256 of an object, streamed. After a broken connection only the rest is requested."""
    loop = asyncio.get_running_loop()
    hashing = _Hashing(store, key, info, hashed, loop)
    if info.size:
        await with_retry(hashing.receive, deadline_seconds=PATIENCE_SECONDS + info.size / FLOOR)
    return hashing.digest.hexdigest()


class _Hashing:
    """Hashes an object as it arrives. Bytes that arrived before a connection broke count."""

    def __init__(
        self, store: ObjectStore, key: str, info: ObjectInfo, hashed: ByteCount, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.digest = hashlib.sha256()
        self._store, self._key, self._info = store, key, info
        self._hashed, self._loop = hashed, loop
        self._position = 0

    async def receive(self) -> None:
        """Receive the rest."""
        start, stop = self._position, self._info.size
        await self._store.receive(
            self._key, self._take, max_bytes=stop - start, if_match=self._info.etag, byte_range=(start, stop)
        )

    def _take(self, piece: memoryview) -> None:
        self.digest.update(piece)
        self._position += len(piece)
        self._loop.call_soon_threadsafe(self._hashed.add, len(piece))


async def _check_footer(store: ObjectStore, key: str, info: ObjectInfo, shard: ParquetShard) -> None:
    """Raise DataError if the file's row groups differ from the manifest, or hold no text."""
    footer, _ = await with_retry(
        lambda: fetch_footer(store, key, shard, guess=_FOOTER_GUESS), deadline_seconds=PATIENCE_SECONDS
    )
    if footer.etag != info.etag:
        raise DataError(f"{key} was replaced during verification")
