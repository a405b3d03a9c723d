"""``MmapStore`` maps raw arrays into memory, without a copy.

The maps are private: processes share the file's pages, and no write reaches the file. A write into a fetched tensor
stays in this process, and its later fetches see it.
"""

from pathlib import Path

import numpy as np
import torch

from tplr.errors import DataError
from tplr.stores.base import ShardKey, StoreShard, TokenStore
from tplr.stores.detect import metas_of
from tplr.stores.meta import KeyMeta, check_size, read_meta
from tplr.stores.token_stream import Array


class MmapStore(TokenStore):
    """Format ``bin``: in each shard's folder ``<key>.bin`` for every key of its ``meta.json``.

    A pickled copy, as in a loader's worker, maps the files again.
    """

    def load(self, path: str | Path, *, allow_incomplete: bool = False) -> None:
        super().load(path, allow_incomplete=allow_incomplete)
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return _opened, (type(self), self._path)

    def _shards(self, path: Path) -> list[StoreShard]:
        return [_shard(meta.parent) for meta in metas_of(path)]


def _opened(kind: type[MmapStore], path: str) -> MmapStore:
    store = kind()
    store.load(path, allow_incomplete=True)  # completeness was checked when the store was first opened
    return store


def _shard(folder: Path) -> StoreShard:
    keys = {}
    for name, key in read_meta(folder).keys.items():
        keys[name] = ShardKey([_mapped(folder / f"{name}.bin", key)], key.offsets, key.groups)
    return StoreShard(str(folder), keys)


def _mapped(path: Path, key: KeyMeta) -> Array:
    try:
        size = path.stat().st_size
        check_size(path, size, key)
        if not size:  # the system refuses to map an empty file
            return np.empty(0, key.dtype)
        # Unlike ``mmap``, torch keeps no descriptor: a store may have more files than a process may open.
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy().view(key.dtype)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, and its meta.json lists it: fetch or prepare the store again") from error
