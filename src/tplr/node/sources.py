"""Training data of a window: pages of a text dataset or sequences of a token store, behind one protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from tplr.config import DatasetBuckets
from tplr.disk_cache import DiskCache
from tplr.errors import AccessDenied, ConfigError, DataError, ObjectNotFound
from tplr.hparams import HParams
from tplr.pages.dataset import PageDataset
from tplr.pages.manifest import DatasetManifest
from tplr.pages.manifest_cache import ManifestCache, dataset_place
from tplr.pages.page_draw import ROWS_PER_PAGE, pages_digest
from tplr.resources import Resources
from tplr.schemas import PageRef
from tplr.seeds import held_out_page_draw, held_out_samples_seed, page_draw, samples_seed
from tplr.storage import S3Connections
from tplr.stores.bucket import CACHE_BYTES, open_bucket_store
from tplr.stores.sequences import SampleReader, SequenceAssignment, samples_digest

# Held-out pages are oversampled, because some may be assigned to a miner.
OVERSAMPLING = 8

D = TypeVar("D")  # the samples of a source: pages, or sequence numbers


class WindowDataSource(Protocol[D]):
    """A dataset and its sampling rules: every node that knows the block's hash gets the same samples."""

    def assigned(self, uid: int, window: int, block_hash: str) -> D:
        """Sample the data of ``uid`` in ``window``; ``block_hash``: of the first block of ``seed_window(window)``."""
        ...

    def held_out(self, hotkey: str, block_hash: str, apart_from: Sequence[D]) -> D:
        """Sample random data for a validator's evaluation, disjoint from ``apart_from``.

        Args:
            block_hash: of the first block after the window.

        Raises:
            DataError: all sampled data are in ``apart_from``.
        """
        ...

    def digest(self, sampled: D) -> str:
        """Return the hex SHA-256 of the dataset's version and the sample; "" if a uid has no data."""
        ...

    async def batches(self, sampled: D) -> np.ndarray:
        """Load the batches of a sample: int64 (batches, batch_size, sequence_length).

        Raises:
            DataError: the data contradict their manifest.
            StoreError: they can't be read.
        """
        ...


class PageDataSource:
    """Seeded pages of parquet files (``pages/page_draw.py``)."""

    def __init__(self, dataset: PageDataset, hparams: HParams) -> None:
        self._dataset = dataset
        self._hparams = hparams

    @property
    def sha256(self) -> str:
        """The hash of the dataset's manifest."""
        return self._dataset.manifest.sha256

    def assigned(self, uid: int, window: int, block_hash: str) -> Sequence[PageRef]:
        count = self._hparams.pages_per_window
        draw = page_draw(self._hparams.profile, uid=uid, window=window, pages_per_window=count, block_hash=block_hash)
        return self._dataset.pages(draw, count)

    def held_out(self, hotkey: str, block_hash: str, apart_from: Sequence[Sequence[PageRef]]) -> Sequence[PageRef]:
        taken = [page for pages in apart_from for page in pages]
        draw = held_out_page_draw(hotkey=hotkey, block_hash=block_hash)
        sampled = self._dataset.pages(draw, OVERSAMPLING * self._hparams.pages_per_window)
        free = [page for page in sampled if not any(_share_rows(page, other) for other in taken)]
        if not free:
            raise DataError(
                f"all of {len(sampled)} held-out pages are assigned to evaluated miners: use a larger dataset"
            )
        return free[: self._hparams.pages_per_window]

    def digest(self, sampled: Sequence[PageRef]) -> str:
        return pages_digest(sampled, self._dataset.manifest.sha256)

    async def batches(self, sampled: Sequence[PageRef]) -> np.ndarray:
        return await self._dataset.batches(sampled, self._hparams.batch_size, self._hparams.sequence_length)


class StoreDataSource:
    """Sequences of a token store (``stores/sequences.py``)."""

    def __init__(self, samples: SampleReader, hparams: HParams) -> None:
        assert hparams.store is not None
        self._samples = samples
        self._hparams = hparams
        self._assignment = SequenceAssignment(
            sequences=samples.sequences,
            order=samples.sha256,
            samples_per_window=hparams.store.samples_per_window,
            uids=hparams.store.uids,
        )

    @property
    def sha256(self) -> str:
        """The hash of the token store."""
        return self._samples.sha256

    def assigned(self, uid: int, window: int, block_hash: str) -> Sequence[int]:
        seed = samples_seed(self._hparams.profile, window=window, block_hash=block_hash)
        return self._assignment.of(uid, window, seed)

    def held_out(self, hotkey: str, block_hash: str, apart_from: Sequence[Sequence[int]]) -> Sequence[int]:
        taken = {sequence for sequences in apart_from for sequence in sequences}
        return self._assignment.held_out(held_out_samples_seed(hotkey=hotkey, block_hash=block_hash), taken)

    def digest(self, sampled: Sequence[int]) -> str:
        return samples_digest(sampled, self._samples.sha256, self._hparams.sequence_length) if sampled else ""

    async def batches(self, sampled: Sequence[int]) -> np.ndarray:
        if not sampled:
            raise DataError("this uid has no share of the store: raise store.uids")
        rows = await self._samples.read(sampled)
        return rows.reshape(-1, self._hparams.batch_size, self._hparams.sequence_length)


async def open_data_source(
    hparams: HParams,
    tokenizer: object,
    connections: S3Connections,
    location: DatasetBuckets,
    cache_folder: Path,
    *,
    resources: Resources,
) -> PageDataSource | StoreDataSource:
    """Open the run's data in the dataset bucket.

    Raises:
        DataError: the data don't fit the run's constants.
        ConfigError: the bucket does not have the data, or the key does not open it.
        StoreError: the data can't be read.
    """
    stores = [connections.store(bucket) for bucket in location.replicas]
    try:
        if hparams.data == "store":
            cache = DiskCache(cache_folder / "blocks", max_bytes=CACHE_BYTES)
            store, reader = await open_bucket_store(stores, location.subfolder, cache, resources.transfers)
            samples = SampleReader(
                store, reader, sequence_length=hparams.sequence_length, vocab_size=hparams.model.vocab_size
            )
            return StoreDataSource(samples, hparams)
        manifests = ManifestCache(
            cache_folder, dataset_place(location.replicas, location.subfolder, connections.endpoint)
        )
        dataset = await PageDataset.open(
            stores,
            location.subfolder,
            tokenizer,
            concurrency=resources.transfers,
            cache=manifests,
            threads=resources.data_threads,
        )
    except (AccessDenied, ObjectNotFound) as error:
        raise ConfigError(f"{error}: check R2_DATASET_* and TPLR_DATASET_SUBFOLDER") from error
    check_address(dataset.manifest, hparams)
    return PageDataSource(dataset, hparams)


def check_address(manifest: DatasetManifest, hparams: HParams) -> None:
    """Raise ConfigError if the dataset and the run address pages differently: nodes would sample different rows."""
    if manifest.address != hparams.page_address:
        raise ConfigError(
            f"the dataset's manifest addresses pages by {manifest.address!r}, page_address in hparams is "
            f"{hparams.page_address!r}: use the run's own dataset and hparams (TPLR_DATASET_SUBFOLDER, R2_DATASET_*)"
        )


def _share_rows(page: PageRef, other: PageRef) -> bool:
    same = (page.config, page.split) == (other.config, other.split)
    return same and abs(page.row - other.row) < ROWS_PER_PAGE
