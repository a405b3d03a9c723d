"""``BucketReader`` opens a store in a bucket for programs without an event loop. No node imports it."""

import os
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, Self

from tplr.disk_cache import DiskCache
from tplr.errors import DataError
from tplr.storage.blocking import BucketConnections
from tplr.storage.replicas import Replicas
from tplr.stores.base import TokenStore
from tplr.stores.blocks import BlockReader, RemoteFile
from tplr.stores.bucket import CACHE_BYTES, BucketStore, list_shards
from tplr.stores.detect import META
from tplr.stores.factory import StoreFactory
from tplr.urls import store_key


class BucketReader:
    """Opens the store at ``s3://bucket/prefix`` for programs without an event loop. As a context manager it closes its
    connections; otherwise they stay open while the program runs.

        with BucketReader("s3://books/tokens") as reader:
            dataset = DatasetFactory.load("seq", None, 2048, store=reader.open())

    Credentials come from the environment, as for pipelines (``storage/blocking.py``). A loader's workers each open
    connections of their own when they first read.
    Blocks are cached in ``blocks`` of ``TPLR_CACHE_FOLDER``.
    """

    def __init__(self, url: str) -> None:
        self._place = store_key(url.rstrip("/"))
        self._process: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process == os.getpid():
            self._stores.__exit__(None, None, None)
        self._process = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_place": self._place, "_process": None}

    def open(self) -> TokenStore:
        """Open the store. Formats other than ``bin`` are fetched completely now and read into memory.

        Raises:
            ConfigError: there are no credentials for the bucket.
            DataError, StoreError: as ``open_bucket_store``.
        """
        self._start()
        shards = self._stores.submit(list_shards(self._replicas, self._place.key)).result()
        formats = {shard.shard.format for shard in shards}
        if formats == {"bin"}:
            return BucketStore(shards, self.read)
        if len(formats) > 1:
            raise DataError(f"{self._place.key}: shards of several formats: {', '.join(sorted(formats))}")
        with tempfile.TemporaryDirectory() as name:
            for shard in shards:
                folder = Path(name) / PurePosixPath(shard.path).parent
                folder.mkdir(parents=True, exist_ok=True)  # that of a store of one shard is there
                (folder / META).write_bytes(shard.meta.to_json())
                for file in shard.files.values():
                    (folder / file.meta.path).write_bytes(self.read(file, 0, file.meta.bytes))
            store = StoreFactory.create(formats.pop())
            store.load(name)
        return store

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """As ``BlockReader.read``; blocks."""
        self._start()
        return self._stores.submit(self._reader.read(file, start, stop)).result()

    def _start(self) -> None:
        """Connect once in each process: threads do not survive a fork."""
        if self._process == os.getpid():
            return
        self._stores = BucketConnections()
        self._stores.__enter__()
        self._replicas = Replicas([self._stores.submit(self._stores.store(self._place.bucket)).result()])
        folder = self._stores.environment.cache_folder / "blocks"
        self._reader = BlockReader(self._replicas, DiskCache(folder, max_bytes=CACHE_BYTES))
        self._process = os.getpid()
