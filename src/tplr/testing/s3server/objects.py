"""Objects on disk, and the index of their keys.

An object's file is named by the SHA-256 of its key, so no key can leave its bucket's folder, be too long for the file
system, or collide with another key (``a`` and ``a/b``). The index is rebuilt from the files at start.
"""

import bisect
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from tplr.testing.s3server.blobfile import Draft, read_record
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.listing import Page, list_page
from tplr.testing.s3server.preconditions import Conditions

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object's record.

    Attributes:
        size: bytes.
        etag: without quotes.
        last_modified: unix seconds, in whole milliseconds, by the server's clock when the object became visible.
        headers: lower-case names; returned as received (content type, user metadata).
        checksums: ``x-amz-checksum-*`` headers, returned to a client that asks for them.
    """

    key: str
    size: int
    etag: str
    last_modified: float
    headers: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


class Bucket:
    """One bucket's folder and its index. Callers hold the lock of :class:`ObjectFiles`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[str, StoredObject] = {}
        self.names: list[str] = []  # the index's keys, sorted
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        for path in sorted((folder / "objects").glob("*/*")):
            try:
                with path.open("rb") as file:
                    record = StoredObject(**read_record(file))
            except (OSError, ValueError, TypeError) as error:
                log.warning("%s is ignored, it holds no object: %s", path, error)
            else:
                self.index[record.key] = record
        self.names = sorted(self.index)

    def path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / "objects" / name[:2] / name

    def add(self, record: StoredObject) -> None:
        if record.key not in self.index:
            bisect.insort(self.names, record.key)
        self.index[record.key] = record

    def remove(self, key: str) -> None:
        if self.index.pop(key, None) is not None:
            del self.names[bisect.bisect_left(self.names, key)]


class ObjectFiles:
    """Every bucket under ``root``. The methods block, and may be called from any thread.

    Args:
        root: a folder that nothing else writes to.
        fsync: objects survive a power cut; without it, only a crash of the process.
        clock: unix seconds, for LastModified.
    """

    def __init__(self, root: Path, *, fsync: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._fsync = fsync
        self._clock = clock
        self._lock = threading.Lock()
        self._drafts = root / "drafts"
        # Unfinished drafts of a killed process.
        shutil.rmtree(self._drafts, ignore_errors=True)
        self._drafts.mkdir(parents=True, exist_ok=True)
        (root / "buckets").mkdir(exist_ok=True)
        self._buckets = {path.name: Bucket(path) for path in sorted((root / "buckets").iterdir())}

    def create_bucket(self, name: str) -> None:
        """Creates the bucket; does nothing if it exists."""
        with self._lock:
            if name not in self._buckets:
                self._buckets[name] = Bucket(self._root / "buckets" / name)

    def has_bucket(self, name: str) -> bool:
        return name in self._buckets

    def folder(self, bucket: str) -> Path:
        return self._bucket(bucket).folder

    def now(self) -> float:
        """Unix seconds by the server's clock, truncated to milliseconds."""
        return int(self._clock() * 1000) / 1000

    def draft(self) -> Draft:
        return Draft(self._drafts, fsync=self._fsync)

    def find(self, bucket: str, key: str) -> StoredObject | None:
        with self._lock:
            return self._bucket(bucket).index.get(key)

    def commit(
        self,
        bucket: str,
        key: str,
        draft: Draft,
        *,
        etag: str,
        headers: dict[str, str],
        checksums: dict[str, str],
        conditions: Conditions,
    ) -> StoredObject:
        """Makes the draft the object, in one step, if the conditions hold at that moment."""
        draft.sync()
        with self._lock:
            home = self._bucket(bucket)
            conditions.check_write(home.index.get(key))
            record = StoredObject(
                key=key,
                size=draft.size,
                etag=etag,
                last_modified=self.now(),
                headers=headers,
                checksums=checksums,
            )
            path = home.path(key)
            path.parent.mkdir(exist_ok=True)
            draft.publish(path, asdict(record))
            home.add(record)
        return record

    def open(self, bucket: str, key: str) -> tuple[BinaryIO, StoredObject]:
        """The object's open file and its record; neither changes if the object is replaced afterwards."""
        with self._lock:
            home = self._bucket(bucket)
            if key not in home.index:
                raise S3Error("NoSuchKey", f"Bucket {bucket} has no such key.")
            file = home.path(key).open("rb")
        return file, StoredObject(**read_record(file))

    def delete(self, bucket: str, key: str) -> None:
        """Deletes the object; does nothing if it does not exist."""
        with self._lock:
            home = self._bucket(bucket)
            home.path(key).unlink(missing_ok=True)
            home.remove(key)

    def page(
        self, bucket: str, *, prefix: str, delimiter: str, after: str, limit: int
    ) -> tuple[Page, list[StoredObject]]:
        """One page of names, and the records of its keys."""
        with self._lock:
            home = self._bucket(bucket)
            page = list_page(home.names, prefix=prefix, delimiter=delimiter, after=after, limit=limit)
            return page, [home.index[key] for key in page.keys]

    def _bucket(self, name: str) -> Bucket:
        if name not in self._buckets:
            raise S3Error("NoSuchBucket", f"There is no bucket {name[:80]!r}.")
        return self._buckets[name]
