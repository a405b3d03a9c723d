"""Identifies the sources of a preparation by their content, and says which changed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tplr.disk_cache import DiskCache
from tplr.errors import DataError
from tplr.seeds import hash_parts

CACHE_BYTES = 2**20
Source = dict[str, Any]


class Sources:
    """The input files as they are when this is made.

    Args:
        cache_folder: of this machine. A file is hashed once for all preparations.

    Attributes:
        identity: name, size in bytes and SHA-256 of each.
    """

    def __init__(self, files: Sequence[Path], cache_folder: Path) -> None:
        # A file's hash is cached by what changes with its content.
        cache = DiskCache(cache_folder / "source_hashes", max_bytes=CACHE_BYTES)
        self._files = files
        self._stamps = [*map(_stamp, files)]
        self.identity: list[Source] = [
            {"name": path.name, "size": stamp[0], "sha256": _sha256(path, stamp, cache)}
            for path, stamp in zip(files, self._stamps, strict=True)
        ]

    def check_unchanged(self) -> None:
        """Raise DataError if a file was written since."""
        for path, stamp in zip(self._files, self._stamps, strict=True):
            if not path.exists() or _stamp(path) != stamp:
                raise DataError(f"{path} changed while it was read: remove the output folder and prepare it again")


def difference(old: Sequence[Source], new: Sequence[Source]) -> str | None:
    """The first source that differs, and how; None if all are equal."""
    names = [[source["name"] for source in sources] for sources in (old, new)]
    if names[0] != names[1]:
        return f"the sources were {', '.join(names[0])}; now they are {', '.join(names[1])}"
    for one, other in zip(old, new, strict=True):
        if one != other:
            sizes = f": {one['size']} bytes then, {other['size']} now" if one["size"] != other["size"] else ""
            return f"the content of source {one['name']} changed{sizes}"
    return None


def _stamp(path: Path) -> tuple[int, int, int, int]:
    """Size, and what changes whenever a file is written or replaced; ``touch`` can set back the mtime only."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _sha256(path: Path, stamp: tuple[int, ...], cache: DiskCache) -> str:
    key = hash_parts(path.resolve(), *stamp)
    if known := cache.read(key):
        return known.decode()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _stamp(path) == stamp:
        cache.write(key, digest.encode())
    return digest
