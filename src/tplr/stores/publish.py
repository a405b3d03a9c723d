"""Uploads a dataset or a token store to a bucket. Skips present files; writes the manifest last, but a preparation's
report first."""

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from tplr.errors import ConfigError, DataError, StoreError
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, upload_file
from tplr.storage.base import CHUNK_BYTES
from tplr.storage.many import for_each
from tplr.storage.parts import cut, multipart_etag
from tplr.storage.progress import ByteCount, Progress
from tplr.storage.retry import with_retry
from tplr.stores.detect import REPORT
from tplr.stores.expected_files import expected_files, list_prefix, local_prefix, manifest_paths

FILES_AT_ONCE = 2  # each with up to four parts at a time
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Published:
    """Number of files that were sent, and of files that were skipped."""

    sent: int
    skipped: int


async def publish(
    folder: Path, store: ObjectStore, prefix: str, *, replace: bool = False, progress: Progress | None = None
) -> Published:
    """Upload the files that the manifests in ``folder`` name to ``prefix``, then the manifests; a report comes first.

    Every file is hashed before it is sent and must match its manifest. The next call resumes an interrupted one:
    objects of the same size and ETag are skipped, and a large one continues with its missing parts.

    Args:
        replace: replace another dataset or version there. Its manifest is deleted first, so that readers find no
            dataset, instead of a mixture, until the upload is complete.
        progress: called with the number of bytes known to be stored.

    Raises:
        ConfigError: the prefix holds another dataset or version, and ``replace`` is not given.
        DataError: the folder has no manifest, or does not match it.
        StoreError: the bucket can't be listed or written.
    """
    local, name = local_prefix(folder)
    here = await list_prefix(local, name)
    try:
        expected = await expected_files(local, name, here)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    if problems := [problem for file in expected.files if (problem := file.mismatch(here))]:
        raise DataError(f"{folder} does not match its manifest:\n" + "\n".join(problems))
    there = await with_retry(lambda: list_prefix(store, prefix), deadline_seconds=_PATIENCE_SECONDS)
    foreign = [
        path for path in manifest_paths(there) if not await asyncio.to_thread(_is_ours, there[path], folder / path)
    ]
    if foreign and not replace:
        raise ConfigError(
            f"{store.name}/{prefix}/{foreign[0]} belongs to another dataset or version than {folder}, and would be "
            "lost for nodes that use it: choose another subfolder, or give --replace"
        )
    for path in foreign:
        await with_retry(lambda path=path: store.delete(f"{prefix}/{path}"), deadline_seconds=_PATIENCE_SECONDS)

    hashes = {**dict.fromkeys(expected.manifests), **{file.path: file.sha256 for file in expected.files}}
    total = sum(here[path].size for path in hashes)
    stored = ByteCount(total, progress)
    sent: list[str] = []

    async def send(path: str) -> None:
        digests = await asyncio.to_thread(digests_of, folder / path)
        if hashes[path] not in (None, digests.sha256):
            raise DataError(f"{folder / path}: its SHA-256 is {digests.sha256}, the manifest says {hashes[path]}")
        if path not in there or not digests.fits(there[path]):
            info = await upload_file(store, f"{prefix}/{path}", folder / path)
            if not digests.fits(info):
                raise StoreError(f"{folder / path} changed during the upload", bucket=store.name, key=info.key)
            sent.append(path)
        stored.add(digests.size)

    if REPORT in hashes:
        await send(REPORT)  # first: readers refuse a store that lacks a shard of its report
    await for_each([path for path in hashes if path not in expected.manifests], send, concurrency=FILES_AT_ONCE)
    for path in expected.manifests:
        if path != REPORT:
            await send(path)
    return Published(len(sent), len(hashes) - len(sent))


@dataclass(frozen=True)
class FileDigests:
    """A file's size, its SHA-256, and its ETags after a single PUT and after ``upload_file``."""

    size: int
    sha256: str
    etags: frozenset[str]

    def fits(self, info: ObjectInfo) -> bool:
        """Return whether the object has this file's content."""
        return info.size == self.size and info.etag in self.etags


def digests_of(path: Path) -> FileDigests:
    """Read a file once. Blocks."""
    sha256, md5, md5s = hashlib.sha256(), hashlib.md5(usedforsecurity=False), []
    with path.open("rb") as file:
        parts = cut(path.stat().st_size)
        for part in parts:
            md5_of_part = hashlib.md5(usedforsecurity=False)
            for start in range(part.start, part.stop, CHUNK_BYTES):
                data = file.read(min(CHUNK_BYTES, part.stop - start))
                sha256.update(data)
                md5.update(data)
                if len(parts) > 1:
                    md5_of_part.update(data)
            md5s.append(md5_of_part.hexdigest())
        etags = {md5.hexdigest()} | ({multipart_etag(md5s)} if len(parts) > 1 else set())
        return FileDigests(file.tell(), sha256.hexdigest(), frozenset(etags))


def _is_ours(info: ObjectInfo, path: Path) -> bool:
    return path.is_file() and digests_of(path).fits(info)
