"""``R2DatasetLoader``: batches of seeded pages, from the dataset bucket that the environment names.

A facade over ``tplr.data``: nodes hold a ``PageDataset``, which knows no environment.
"""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import s3fs

from tplr import config
from tplr.data.manifest import fetch_manifest
from tplr.data.manifest_cache import ManifestCache, dataset_place
from tplr.data.page_dataset import PageDataset
from tplr.data.pages import ROWS_PER_PAGE, next_pages
from tplr.data.reader import PageReader
from tplr.data.replicas import Replicas
from tplr.data.shards import Manifest
from tplr.schemas import Bucket, PageRef
from tplr.storage.s3 import S3Connections, endpoint_url


class R2DatasetLoader:
    """Batches of some pages, again each time it is iterated over.

        pages = await R2DatasetLoader.next_pages(offset=window * 6, n_pages=6, seed=uid)
        loader = await R2DatasetLoader.create(6, 2048, pages, tokenizer)
        for batch in loader: ...    # (batch_size, sequence_length) int64

    Credentials come from ``tplr.config.BUCKET_SECRETS["dataset"]``. Iterating blocks nothing: ``create`` has fetched
    everything. What can't be had or contradicts the manifest raises ``StoreError`` or ``DataError`` (a ValueError).
    """

    DATASET_SUBFOLDER: ClassVar[str] = config.DATASET_SUBFOLDER  # TPLR_DATASET_SUBFOLDER goes before it
    CF_REGION_NAME: ClassVar[str] = "enam"
    PREFETCH_SIZE: ClassVar[int] = 3
    MAX_CONCURRENT_REQUESTS: ClassVar[int] = 8
    READ_BUFFER_SIZE: ClassVar[int] = 4 * 1024 * 1024
    BATCH_SIZE: ClassVar[int] = 128

    # A manifest is read once for each place: all nodes of a run must see the same one from beginning to end.
    _manifests: ClassVar[dict[tuple[str, ...], Manifest]] = {}
    _filesystems: ClassVar[dict[Bucket, s3fs.S3FileSystem]] = {}
    _round_robin_index: ClassVar[int] = 0

    def __init__(
        self,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        num_pages: int | None = None,
        tokenizer: Any = None,
        pack_samples: bool = True,
    ) -> None:
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.num_pages = num_pages
        self.tokenizer = tokenizer
        self.pack_samples = pack_samples
        self.num_rows_per_page = ROWS_PER_PAGE
        self.pages: tuple[PageRef, ...] = ()
        self._batches: npt.NDArray[np.int64] = np.empty((0, batch_size or 0, sequence_length or 0), np.int64)
        self._position = 0

    @classmethod
    async def next_pages(
        cls, offset: int, n_pages: int, seed: int | str, num_rows_per_page: int = ROWS_PER_PAGE
    ) -> list[PageRef]:
        """The pages ``(config, row, split)`` that ``seed`` draws from ``offset`` on: ``tplr.data.pages.next_pages``."""
        async with cls._replicas() as replicas:
            manifest = await cls._manifest(replicas)
        configs = manifest.configs.values()
        return [*next_pages(configs, offset=offset, n_pages=n_pages, seed=seed, rows_per_page=num_rows_per_page)]

    @classmethod
    async def create(
        cls,
        batch_size: int,
        sequence_length: int,
        pages_info: Iterable[tuple[str, int, str]],
        tokenizer: Any,
        pack_samples: bool = True,
    ) -> Self:
        """A loader that holds all whole batches of the pages."""
        loader = cls(batch_size, sequence_length, None, tokenizer, pack_samples)
        loader.pages = tuple(PageRef(*page) for page in pages_info)
        loader.num_pages = len(loader.pages)
        async with cls._replicas() as replicas:
            manifest = await cls._manifest(replicas)
            reader = PageReader(manifest, cls._subfolder(), replicas)
            dataset = PageDataset(manifest, reader, tokenizer, pack_samples=pack_samples)
            loader._batches = await dataset.batches(loader.pages, batch_size, sequence_length)
        return loader

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        self._position = 0
        return self

    def __next__(self) -> npt.NDArray[np.int64]:
        if self._position >= len(self._batches):
            raise StopIteration
        self._position += 1
        return self._batches[self._position - 1].copy()

    def get_page_names(self) -> list[str]:
        """``config_row_split`` of each page."""
        return [f"{page.config}_{page.row}_{page.split}" for page in self.pages]

    @classmethod
    async def fetch_dataset_configs(cls) -> dict[str, dict[str, Any]]:
        """Config name -> ``{"num_rows", "split", "shards": [{"path", "num_rows", ...}]}``, in the manifest's order."""
        sizes, _ = await cls._load_r2_metadata()
        return {
            name: {"num_rows": entry["total_rows"], "split": entry["split"], "shards": entry["shards"]}
            for name, entry in sizes.items()
        }

    @classmethod
    async def _load_r2_metadata(cls) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shard sizes and metadata in the shape of the two manifest objects; each path begins with the bucket's name,
        as ``_get_fs().open`` takes it."""
        async with cls._replicas() as replicas:
            manifest = await cls._manifest(replicas)
        root = f"{config.bucket_for('dataset', 'read').name}/{cls._subfolder()}"
        sizes = {
            name: {
                "split": entry.split,
                "total_rows": entry.num_rows,
                "shards": [
                    {
                        "path": f"{root}/{shard.path}",
                        "num_rows": shard.num_rows,
                        "byte_size": shard.byte_size,
                        "sha256": shard.sha256,
                    }
                    for shard in entry.shards
                ],
            }
            for name, entry in manifest.configs.items()
        }
        return sizes, {"configs": [{"config_name": name} for name in sizes], "address": manifest.address}

    @classmethod
    def _get_fs(cls) -> s3fs.S3FileSystem:
        """A file system over the dataset's bucket, the next of its replicas at each call; for programs that look into
        shards themselves. Pages are read without it."""
        buckets = config.buckets_for("dataset", "read")
        bucket = buckets[cls._round_robin_index % len(buckets)]
        cls._round_robin_index += 1
        if bucket not in cls._filesystems:
            cls._filesystems[bucket] = s3fs.S3FileSystem(
                key=bucket.access_key_id,
                secret=bucket.secret_access_key,
                endpoint_url=endpoint_url(bucket, config.endpoint_override()),
                client_kwargs={"region_name": cls.CF_REGION_NAME},
                default_block_size=cls.READ_BUFFER_SIZE,
                # With s3fs's own read-ahead, a row group costs up to 292 times its bytes.
                default_cache_type="none",
                config_kwargs={
                    "signature_version": "s3v4",
                    "s3": {"addressing_style": "path"},
                    "max_pool_connections": 50,
                    "connect_timeout": 5,
                    "read_timeout": 10,
                    "tcp_keepalive": True,
                    # R2 refuses the checksums that newer SDKs send.
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
                skip_instance_cache=True,
            )
        return cls._filesystems[bucket]

    @classmethod
    def _subfolder(cls) -> str:
        return config.dataset_subfolder(default=cls.DATASET_SUBFOLDER)

    @classmethod
    @contextlib.asynccontextmanager
    async def _replicas(cls) -> AsyncIterator[Replicas]:
        async with S3Connections(config.endpoint_override()) as connections:
            stores = [connections.store(bucket) for bucket in config.buckets_for("dataset", "read")]
            yield Replicas(stores, concurrency=cls.MAX_CONCURRENT_REQUESTS)

    @classmethod
    async def _manifest(cls, replicas: Replicas) -> Manifest:
        buckets = config.buckets_for("dataset", "read")
        place = dataset_place(buckets, cls._subfolder(), config.endpoint_override())
        if place not in cls._manifests:
            cache = ManifestCache(config.cache_folder(), place)
            cls._manifests[place] = await fetch_manifest(replicas, cls._subfolder(), cache)
        return cls._manifests[place]
