"""``JsonlStore`` reads records from JSON Lines into memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tplr.errors import DataError
from tplr.logging import logger
from tplr.records.jsonl import READ_BYTES, LineReader, is_blank, parse_json
from tplr.stores.base import ShardKey, StoreShard, TokenStore
from tplr.stores.data_files import data_files
from tplr.stores.detect import META, files_of
from tplr.stores.meta import KeyMeta, read_meta

Transform = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
_DTYPES = {"b": "bool", "i": "int64", "f": "float32"}


class JsonlStore(TokenStore):
    """Format ``jsonl``: one line per record, an object with a list of numbers (or a list of lists) for each key.

    Args:
        transform: converts a raw record to such an object, or returns None or raises DataError. With it, unusable
            records are skipped and counted in ``skipped``; without it they are an error.

    Attributes:
        skipped: number of skipped raw records.
    """

    def __init__(self, *, transform: Transform | None = None) -> None:
        super().__init__()
        self._transform = transform
        self.skipped = 0

    def _shards(self, path: Path) -> list[StoreShard]:
        files = data_files(path, ".jsonl") if self._transform is None else files_of(path, ".jsonl")
        metas = [self._meta(file.parent) for file in files]
        shards = [self._shard(file, meta) for file, meta in zip(files, metas, strict=True)]
        if self.skipped:
            logger.warning("%s: %d records left out: not usable", path, self.skipped)
        dtypes = _widest([shard for shard, meta in zip(shards, metas, strict=True) if not meta])
        shards = [shard if meta else _widened(shard, dtypes) for shard, meta in zip(shards, metas, strict=True)]
        # A file without a record has no keys.
        return [shard for shard in shards if shard.keys]

    def _meta(self, folder: Path) -> Mapping[str, KeyMeta]:
        return read_meta(folder).keys if self._transform is None and (folder / META).exists() else {}

    def _shard(self, path: Path, meta: Mapping[str, KeyMeta]) -> StoreShard:
        records = [*self._records_of(path)]
        names = [*meta] or [*(records[0][1] if records else ())]
        keys = {}
        for name in names:
            columns = []
            for line, record in records:
                if set(record) != set(names):
                    raise DataError(f"{path} line {line}: keys {', '.join(record)}; expected {', '.join(names)}")
                columns.append((line, record[name]))
            keys[name] = _column(str(path), name, columns, meta.get(name))
        return StoreShard(str(path), keys)

    def _records_of(self, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with path.open("rb", buffering=0) as file:
            lines = LineReader(partial(file.read, READ_BYTES))
            for line in lines:
                if is_blank(line):
                    continue
                try:
                    record = parse_json(line)
                    if not isinstance(record, dict):
                        raise DataError(f"expected an object, got {type(record).__name__}")
                    record = self._transform(record) if self._transform else record
                    if record is None:
                        raise DataError("no usable record")
                except ValueError as error:  # includes DataError
                    if self._transform is None:
                        raise DataError(f"{path} line {lines.number}: {error}") from error
                    self.skipped += 1
                    continue
                yield lines.number, record


def _column(path: str, name: str, rows: list[tuple[int, Any]], meta: KeyMeta | None) -> ShardKey:
    """One key of all records of a file."""
    nested = meta.groups is not None if meta else bool(rows) and _is_nested(rows[0][1])
    lists, groups = [], [0]
    for line, value in rows:
        parts = value if nested else [value]
        if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
            expected = "a list of lists of numbers" if nested else "a list of numbers"
            raise DataError(f"{path} line {line}: key {name!r}: expected {expected}")
        for part in parts:
            if not all(type(number) in (int, float, bool) for number in part):
                raise DataError(f"{path} line {line}: key {name!r}: expected numbers only")
            if part and float not in map(type, part) and not -(2**63) <= min(part) <= max(part) < 2**63:
                raise DataError(f"{path} line {line}: key {name!r}: expected numbers of at most 64 bits, with a sign")
        lists += parts
        groups.append(len(lists))
    flat = np.array([*chain.from_iterable(lists)])
    dtype = meta.dtype if meta else _DTYPES[flat.dtype.kind] if len(flat) else "int64"
    values = _as(flat, dtype, f"{path}: key {name!r}")
    offsets = [0, *accumulate(map(len, lists))]
    if meta and (len(values), offsets, groups if nested else None) != (meta.elements, meta.offsets, meta.groups):
        raise DataError(f"{path}: key {name!r} does not match its meta.json, it may be truncated: fetch it again")
    return ShardKey([values], offsets, groups if nested else None)


def _widest(shards: list[StoreShard]) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each key that one file of all records would have, as files without a meta are one dataset."""
    found: dict[str, list[np.dtype[Any]]] = {}
    for shard in shards:
        for name, key in shard.keys.items():
            found.setdefault(name, []).extend(part.dtype for part in key.segments if len(part))
    order = [*map(np.dtype, _DTYPES.values())]
    return {name: max(dtypes, key=order.index) for name, dtypes in found.items() if dtypes}


def _widened(shard: StoreShard, dtypes: Mapping[str, np.dtype[Any]]) -> StoreShard:
    keys = {}
    for name, key in shard.keys.items():
        parts = [part[:] for part in key.segments]
        if dtypes.get(name) == np.float32:  # ``np.array`` of a list with a float rounds its integers to float64 first
            parts = [part.astype(np.float64) for part in parts]
        keys[name] = replace(key, segments=[part.astype(dtypes.get(name, part.dtype)) for part in parts])
    return replace(shard, keys=keys)


def _as(flat: np.ndarray, dtype: str, where: str) -> np.ndarray:
    values = flat.astype(dtype)
    if np.dtype(dtype).kind in "iub" and not np.array_equal(values, flat):
        raise DataError(f"{where} holds numbers that {dtype} can't represent")
    return values


def _is_nested(value: Any) -> Literal[True, False]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)
