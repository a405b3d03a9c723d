"""Identifies the sources of a preparation by their content, and says which changed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tplr.disk_cache import DiskCache
from tplr.errors import DataError, ObjectNotFound
from tplr.logging import logger
from tplr.seeds import hash_parts
from tplr.streams.sources.source_file import SourceFile
from tplr.urls import STORE_SCHEMES, local_path

CACHE_BYTES = 2**20
Source = dict[str, Any]


class Sources:
    """The input files as of this object's creation.

    Args:
        cache_folder: this machine's cache folder. A file is hashed once for all preparations.

    Attributes:
        identity: name, size in bytes and SHA-256 of each file. For a file that is not on this machine, the server's
            version (such as an ETag) replaces the SHA-256.
    """

    def __init__(self, files: Sequence[SourceFile], cache_folder: Path) -> None:
        # A file's hash is cached by attributes that change with its content.
        cache = DiskCache(cache_folder / "source_hashes", max_bytes=CACHE_BYTES)
        self.files = files
        self._stamps = [*map(_stamp, files)]
        self.identity = [_identity(file, stamp, cache) for file, stamp in zip(files, self._stamps, strict=True)]

    @property
    def sizes(self) -> list[int]:
        """Stored size of each file in bytes; 0 if unknown."""
        return [stamp[0] for stamp in self._stamps]

    @property
    def versions(self) -> list[str]:
        """Version with which each file in a bucket is read."""
        stamps = zip(self.files, self._stamps, strict=True)
        return [stamp[1] if file.scheme in STORE_SCHEMES else "" for file, stamp in stamps]

    def check_unchanged(self) -> None:
        """Raise DataError if a file was written or removed since."""
        for file, stamp in zip(self.files, self._stamps, strict=True):
            try:
                changed = _stamp(file) != stamp
            except (FileNotFoundError, ObjectNotFound):
                changed = True
            if changed:
                raise DataError(f"{file.url} changed while it was read: remove the output folder and prepare it again")


def difference(old: Sequence[Source], new: Sequence[Source]) -> str | None:
    """Return the first source that differs, and how; None if all are equal."""
    names = [[source["name"] for source in sources] for sources in (old, new)]
    if names[0] != names[1]:
        return f"the sources were {', '.join(names[0])}; now they are {', '.join(names[1])}"
    for one, other in zip(old, new, strict=True):
        if one != other:
            sizes = f": {one['size']} bytes then, {other['size']} now" if one["size"] != other["size"] else ""
            return f"the content of source {one['name']} changed{sizes}"
    return None


def _stamp(file: SourceFile) -> tuple[Any, ...]:
    """Return size and attributes that change when a file is written or replaced; ``touch`` can reset only mtime."""
    if file.scheme != "file":
        return file.status()
    stat = local_path(file.url).stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _identity(file: SourceFile, stamp: tuple[Any, ...], cache: DiskCache) -> Source:
    if file.scheme == "file":
        return {"name": local_path(file.url).name, "size": stamp[0], "sha256": _sha256(file, stamp, cache)}
    if not stamp[1]:
        logger.warning("%s: its server sends neither an ETag nor a date: only a changed size is detected", file.url)
    return {"name": file.url.partition("?")[0].rpartition("/")[2], "size": stamp[0], "version": stamp[1]}


def _sha256(file: SourceFile, stamp: tuple[Any, ...], cache: DiskCache) -> str:
    path = local_path(file.url)
    key = hash_parts(path.resolve(), *stamp)
    if known := cache.read(key):
        return known.decode()
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if _stamp(file) == stamp:
        cache.write(key, digest.encode())
    return digest
