"""``H5Store`` reads HDF5 files once into memory that the workers of a data loader share."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tplr.errors import DataError
from tplr.stores.base import ShardKey, StoreShard, TokenStore
from tplr.stores.data_files import data_files
from tplr.stores.detect import META, import_h5py, natural
from tplr.stores.meta import DTYPES, KeyMeta, read_meta
from tplr.stores.token_stream import Array

_MAX_COMPRESSION = 1032  # of deflate, which is HDF5's usual compression


class H5Store(TokenStore):
    """Format ``h5``: a group for each key, whose datasets ``data_0``, ``data_1``, … follow one another.

    ``meta.json`` in the same folder gives the record positions, and the file must then be large enough for its numbers;
    without it each dataset is a record. No file stays open, so forked workers share memory only. Needs ``h5py`` (extra
    ``h5``).

    Args:
        share_memory: hold the data in anonymous shared memory, so that a loader's workers do not copy it. A write into
            a fetched tensor is then visible to all workers.
    """

    def __init__(self, *, share_memory: bool = True) -> None:
        super().__init__()
        self._share_memory = share_memory

    def _shards(self, path: Path) -> list[StoreShard]:
        return [self._shard(file) for file in data_files(path, ".h5", ".hdf5")]

    def _shard(self, path: Path) -> StoreShard:
        described = (path.parent / META).exists()
        meta = read_meta(path.parent).keys if described else {}
        parts, keys = {}, {}
        try:
            with import_h5py().File(path) as file:
                for name in map(str, meta if described else file):
                    if name not in file:
                        raise DataError(f"{path} lacks the key {name!r} of its meta.json")
                    parts[name] = _datasets(f"{path}: {name}", _member(path, file, name))
                if described:  # as a store from a bucket is; a file of another program may have parts without data
                    _check_stored(path, [part for found in parts.values() for part in found])
                for name, found in parts.items():
                    keys[name] = self._key(f"{path}: {name}", found, meta.get(name))
        except (OSError, RuntimeError, KeyError) as error:  # h5py translates errors of HDF5 to any of these
            raise DataError(f"{path} is not a complete HDF5 file: {error}; fetch or prepare it again") from error
        return StoreShard(str(path), keys)

    def _key(self, where: str, parts: Sequence[Any], meta: KeyMeta | None) -> ShardKey:
        sizes = [part.size for part in parts]
        dtype = parts[0].dtype.newbyteorder("=")  # HDF5 converts while it reads
        found = (str(dtype), sum(sizes))
        if meta and found != (meta.dtype, meta.elements):
            raise DataError(
                f"{where}: {found[1]} elements of {found[0]}; its meta.json says {meta.elements} of {meta.dtype}"
            )
        if found[0] not in DTYPES:
            raise DataError(f"{where} holds {found[0]}; expected one of {', '.join(DTYPES)}")
        whole = self._allocated(where, sum(sizes), dtype)
        offsets = [0, *np.cumsum(sizes).tolist()]
        for part, (begin, end) in zip(parts, pairwise(offsets), strict=True):
            if part.size:
                part.read_direct(whole[begin:end].reshape(part.shape))
            part.id.close()  # frees its cache of up to 1 MiB, which HDF5 keeps until the file is closed
        return ShardKey([whole], meta.offsets, meta.groups) if meta else ShardKey([whole], offsets)

    def _allocated(self, where: str, elements: int, dtype: np.dtype[Any]) -> "InMemory":
        try:
            tensor = torch.from_numpy(np.empty(elements, dtype))
            return InMemory(tensor.share_memory_() if self._share_memory else tensor)
        except (MemoryError, RuntimeError) as error:
            remedy = "enlarge /dev/shm, load with share_memory=False, or" if self._share_memory else "or"
            raise DataError(
                f"{where}: can't allocate the memory for its {elements} elements of {dtype} ({error}): check the file, "
                f"{remedy} prepare it as bin, which is not read into memory"
            ) from error


def _datasets(where: str, group: Any) -> list[Any]:
    """Return the datasets of a key, in order. Raises DataError if it has none, or other objects."""
    h5py = import_h5py()
    if not isinstance(group, h5py.Group):
        raise DataError(f"{where}: expected a group of datasets")
    parts: list[Any] = [_member(where, group, name) for name in sorted(group, key=natural)]
    usable = [isinstance(part, h5py.Dataset) and part.size is not None for part in parts]
    if not parts or not all(usable) or len({part.dtype for part in parts}) > 1:
        raise DataError(f"{where}: expected one or more datasets of one dtype, with a shape")
    return parts


def _check_stored(path: Path, parts: Sequence[Any]) -> None:
    """Raise DataError if a file is too small for its datasets: a few KB can declare gigabytes that were never written,
    are stored once for many datasets, or fill the rest of a chunk."""
    stored = path.stat().st_size
    sizes = [(_bytes_read(part), part.id.get_create_plist().get_nfilters()) for part in parts]
    if sum(size // (_MAX_COMPRESSION if filters else 1) for size, filters in sizes) > stored:
        declared = sum(size for size, _ in sizes)
        raise DataError(
            f"{path} has {stored} bytes, and declares {declared} bytes of numbers, counted as a chunk where that is "
            "larger: they can't all be stored in it; fetch or prepare it again"
        )


def _bytes_read(part: Any) -> int:
    """Return the bytes of a dataset's numbers, or of a chunk if that is larger: HDF5 decompresses whole chunks."""
    chunk = math.prod(part.chunks) * part.dtype.itemsize if part.size and part.chunks else 0
    return max(part.nbytes, chunk)


def _member(where: object, group: Any, name: str) -> Any:
    """Return ``group[name]``. Raises DataError if its data are in another file, which no hash of the shard covers."""
    found = group[name]
    elsewhere = found.file.filename != group.file.filename
    if elsewhere or (isinstance(found, import_h5py().Dataset) and (found.is_virtual or found.external)):
        raise DataError(f"{where}: the data of {name!r} are in another file: copy them into this one")
    return found


class InMemory:
    """A segment in a tensor's memory. It stays shared when it is sent to a spawned worker: torch does that for tensors,
    but not for arrays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._array: Array = tensor.numpy()
        self.dtype = self._array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, where: slice, /) -> Array:
        return self._array[where]

    def __reduce__(self) -> tuple[object, ...]:
        return InMemory, (self._tensor,)
