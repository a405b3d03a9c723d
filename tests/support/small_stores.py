"""Stores on disk of a few numbers, for tests."""

import json
from pathlib import Path

import numpy as np

from tplr.stores.base import TokenStore
from tplr.stores.detect import detect_format
from tplr.stores.factory import StoreFactory
from tplr.stores.writer import Column, write_shard


def column(lists: list[list[float]], dtype: str, groups: list[int] | None = None) -> Column:
    offsets = np.cumsum([0, *map(len, lists)])
    return Column(np.array([x for part in lists for x in part], dtype), offsets, groups and np.array(groups))


def opened(path: Path) -> TokenStore:
    store = StoreFactory.create(detect_format(path))
    store.load(path)
    return store


def write(folder: Path, storage_format: str, *shards: dict[str, Column]) -> Path:
    for number, columns in enumerate(shards):
        write_shard(folder / f"shard_{number:04d}", columns, storage_format, number=number, tokens=0)
    return folder


def spoil_meta(folder: Path, **changes) -> None:
    path = folder / "shard_0000/meta.json"
    raw = json.loads(path.read_text())
    raw["a"] |= changes
    path.write_text(json.dumps(raw))
