"""A folder of plain files as a read-only object store; a key is a path below the folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from tplr.errors import AccessDenied, ObjectNotFound
from tplr.schemas import ObjectInfo
from tplr.storage.base import whole_seconds
from tplr.storage.folder_walk import walk
from tplr.storage.local_store import LocalStore


class PlainFolder(LocalStore):
    """A read-only ``ObjectStore``, also of folders behind symbolic links; writing raises AccessDenied.

    An ETag is the file's size and modification time. It changes when the file is replaced, but does not verify bytes.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root = root

    def _open(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        path = self._root / key
        if not path.is_file():
            raise ObjectNotFound("no such file", bucket=self.name, key=key)
        file = path.open("rb")
        status = os.fstat(file.fileno())
        etag = f"{status.st_size:x}-{status.st_mtime_ns:x}"
        return ObjectInfo(key=key, size=status.st_size, last_modified=whole_seconds(status.st_mtime), etag=etag), file

    def _keys(self, prefix: str) -> Iterator[str]:
        for folder, names in walk(self._root / prefix.rpartition("/")[0], hidden=True):
            for name in names:
                yield (folder / name).relative_to(self._root).as_posix()

    def _put(self, key: str, source: BinaryIO, metadata: dict[str, str], create_only: bool) -> NoReturn:
        self._remove(key)

    def _remove(self, key: str) -> NoReturn:
        raise AccessDenied("this folder is read-only", bucket=self.name, key=key)
