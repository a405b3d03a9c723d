"""Writes a shard: data in one of the formats and ``meta.json``, in a folder that is complete or absent."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.errors import DataError
from tplr.files import atomic_folder
from tplr.stores.detect import META, StoreFormat, import_h5py
from tplr.stores.meta import BLOCK_BYTES, RESERVED, VERSION, FileMeta, KeyMeta, Meta, ShardMeta
from tplr.stores.token_stream import Array

Cuts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Column:
    """One key of a shard's records.

    Attributes:
        values: all numbers, one-dimensional, of the dtype to store.
        offsets: start of each list, then the total.
        groups: the same for the lists of each record; None if a record is one list.
    """

    values: Array
    offsets: Cuts
    groups: Cuts | None = None

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self.offsets if self.groups is None else self.groups) - 1

    def key_meta(self) -> KeyMeta:
        """Its entry in ``meta.json``."""
        return KeyMeta(
            shape=[len(self.values)],
            dtype=self.values.dtype.name,
            offsets=self.offsets.tolist(),
            groups=None if self.groups is None else self.groups.tolist(),
        )


def write_shard(
    folder: Path, columns: Mapping[str, Column], storage_format: StoreFormat, *, number: int, tokens: int
) -> Meta:
    """Write one shard to ``folder`` and replace an existing one. Equal columns give equal bytes. Blocks.

    Args:
        number: of the shard, part of an HDF5 file's name.
        tokens: ``total_tokens`` of its meta.

    Raises:
        DataError: a key is no valid file name, or the columns have different numbers of records.
        StateError: the disk is full or not writable; ``folder`` is as it was.
    """
    for name in columns:
        if name == RESERVED or not name or Path(name).name != name:
            raise DataError(f"key {name!r} can't be the name of a file: choose another")
    keys = {name: column.key_meta() for name, column in columns.items()}
    counts = {name: key.records for name, key in keys.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{folder}: keys with different numbers of records: {counts}")
    with atomic_folder(folder, replace=True) as draft:
        _write_data(draft, columns, storage_format, number)
        shard = ShardMeta(
            format=storage_format,
            version=VERSION,
            total_tokens=tokens,
            records=next(iter(counts.values()), 0) or 0,
            block_bytes=BLOCK_BYTES,
            files=[describe(path) for path in sorted(draft.iterdir())],
        )
        meta = Meta(keys=keys, shard=shard)
        (draft / META).write_bytes(meta.to_json())
    return meta


def describe(path: Path) -> FileMeta:
    """Size and hashes of a file. Blocks."""
    whole, blocks, size = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            blocks.append(hashlib.sha256(block).hexdigest())
            size += len(block)
    return FileMeta(path=path.name, bytes=size, sha256=whole.hexdigest(), blocks=blocks)


def _write_data(folder: Path, columns: Mapping[str, Column], storage_format: StoreFormat, number: int) -> None:
    if storage_format == "bin":
        for name, column in columns.items():
            # ``tofile`` would not tell why a write failed.
            with (folder / f"{name}.bin").open("wb") as file:
                file.write(np.ascontiguousarray(column.values).data)
    elif storage_format == "h5":
        # In memory, as HDF5 crashes the process after a write that failed.
        buffer = io.BytesIO()
        with import_h5py().File(buffer, "w") as file:
            for name, column in columns.items():
                file.create_group(name).create_dataset("data_0", data=column.values)
        (folder / f"data_{number:04d}.h5").write_bytes(buffer.getbuffer())
    else:
        with (folder / "data.jsonl").open("w", encoding="utf-8") as lines:
            for record in records_of({name: _without_booleans(column) for name, column in columns.items()}):
                lines.write(json.dumps(record, separators=(",", ":")) + "\n")


def records_of(columns: Mapping[str, Column]) -> Iterator[dict[str, list[Any]]]:
    """Yield each record as plain lists of numbers, or as lists of lists if a record has several."""
    for record in range(next((column.records for column in columns.values()), 0)):
        found: dict[str, list[Any]] = {}
        for name, column in columns.items():
            first, stop = (record, record + 1) if column.groups is None else column.groups[record : record + 2]
            bounds = pairwise(column.offsets[first : stop + 1].tolist())
            lists = [column.values[begin:end].tolist() for begin, end in bounds]
            found[name] = lists[0] if column.groups is None else lists
        yield found


def _without_booleans(column: Column) -> Column:
    """Return the column with 0 and 1 for booleans."""
    return replace(column, values=column.values.astype(np.uint8)) if column.values.dtype == np.bool_ else column
