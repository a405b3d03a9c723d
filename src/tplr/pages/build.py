"""Writes a dataset: rows of text as parquet shards with a manifest, in a folder that is complete or absent."""

import contextlib
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tplr.errors import ConfigError, StateError
from tplr.files import atomic_write, atomic_writer, sync_folder
from tplr.pages.manifest import METADATA, SHARD_SIZES, TEXT_COLUMN, AddressRule
from tplr.pages.page_draw import ROWS_PER_PAGE

ROWS_PER_GROUP = 1000
ROWS_PER_SHARD = 250_000
SPLIT = "train"
_CONFIG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SCHEMA = pa.schema([(TEXT_COLUMN, pa.string())])


class _ShardEntry(TypedDict):
    path: str
    num_rows: int
    byte_size: int
    sha256: str
    row_group_size: int


class DatasetWriter:
    """Writes configs one after another into a folder; ``write_dataset`` creates it."""

    def __init__(self, folder: Path, rows_per_group: int, rows_per_shard: int) -> None:
        if rows_per_group < 1 or rows_per_shard < 1 or rows_per_shard % rows_per_group:
            raise ConfigError(f"{rows_per_shard} rows a shard: expected a multiple of the row group's {rows_per_group}")
        self._folder = folder
        self._rows_per_group = rows_per_group
        self._groups_per_shard = rows_per_shard // rows_per_group
        self._sizes: dict[str, dict[str, object]] = {}

    def add(self, config: str, rows: Iterable[str]) -> int:
        """Write a config with these rows, with one row group in memory; return the number of rows. Blocks.

        Raises:
            ConfigError: the name is invalid or taken, or there are fewer rows than a page needs.
            StateError: the disk is full or not writable.
        """
        if not _CONFIG_NAME.fullmatch(config) or config == "default":
            raise ConfigError(f"config {config!r}: expected letters, digits, '.', '_' and '-', and not 'default'")
        if config in self._sizes:
            raise ConfigError(f"config {config!r} is there already")
        left = iter(rows)
        groups = iter(lambda: [*islice(left, self._rows_per_group)], [])
        shards: list[_ShardEntry] = []
        for first in groups:
            shard = chain([first], islice(groups, self._groups_per_shard - 1))
            shards.append(self._write_shard(f"{config}/{SPLIT}-{len(shards):05d}.parquet", shard))
        total = sum(shard["num_rows"] for shard in shards)
        if total < ROWS_PER_PAGE + 2:
            raise ConfigError(f"config {config!r} has {total} rows; pages need at least {ROWS_PER_PAGE + 2}")
        self._sizes[config] = {"split": SPLIT, "total_rows": total, "shards": shards}
        return total

    def write_manifest(self, address: AddressRule) -> None:
        """Write the manifest of all configs; call it last. Raises ConfigError without configs, or StateError."""
        if not self._sizes:
            raise ConfigError("a dataset needs at least one config")
        metadata = {"configs": [{"config_name": name} for name in self._sizes], "address": address}
        atomic_write(self._folder / METADATA, yaml.safe_dump(metadata, sort_keys=False).encode())
        atomic_write(self._folder / SHARD_SIZES, json.dumps(self._sizes, indent=1).encode())

    def _write_shard(self, path: str, groups: Iterable[list[str]]) -> _ShardEntry:
        rows = 0
        with (
            atomic_writer(self._folder / path) as file,
            pq.ParquetWriter(
                file,
                _SCHEMA,
                compression="zstd",
                write_page_checksum=True,  # so that readers detect a byte damaged in transit
                use_dictionary=False,  # texts hardly ever repeat
                write_statistics=False,  # the smallest and largest text would enlarge the footer
            ) as writer,
        ):
            for group in groups:
                table = pa.table([pa.array(group, pa.string())], schema=_SCHEMA)
                writer.write_table(table, row_group_size=self._rows_per_group)
                rows += len(group)
        with (self._folder / path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        return {
            "path": path,
            "num_rows": rows,
            "byte_size": size,
            "sha256": digest,
            "row_group_size": self._rows_per_group,
        }


@contextlib.contextmanager
def write_dataset(
    folder: Path,
    *,
    address: AddressRule = "exact",
    rows_per_group: int = ROWS_PER_GROUP,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> Iterator[DatasetWriter]:
    """Open a writer for ``folder``, which appears only if the block ends without an error.

    It writes to a hidden folder and renames it at the end; only a killed process leaves the hidden folder behind. The
    same rows and settings give the same bytes with the same version of pyarrow, which is recorded in every shard.

    Raises:
        ConfigError: ``folder`` exists; or as ``DatasetWriter``.
        StateError: the disk is full or not writable.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; a dataset can't be extended: choose another folder, or remove it")
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.draft")
    try:
        with _disk_errors(folder):
            draft.mkdir(parents=True)
        writer = DatasetWriter(draft, rows_per_group, rows_per_shard)
        yield writer
        writer.write_manifest(address)
        with _disk_errors(folder):
            draft.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"can't write {folder}: {error.strerror}") from error
