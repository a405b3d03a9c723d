"""Stores read in place from a bucket: data fetched, checked, kept and released."""

import asyncio
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tplr.cli import main
from tplr.data import DatasetFactory
from tplr.disk_cache import DiskCache
from tplr.errors import DataError
from tplr.storage import MemoryStore
from tplr.stores import writer
from tplr.stores.bucket import BucketStore, open_bucket_store
from tplr.stores.bucket_reader import BucketReader
from tplr.stores.mmap import MmapStore
from tplr.stores.publish import publish
from tplr.stores.writer import Column, write_shard

BLOCK = 64  # bytes, 16 tokens


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", BLOCK)


def make(folder: Path, storage_format: str = "bin") -> Path:
    for number, length in enumerate((50, 3, 100)):
        tokens = np.arange(1000 * number, 1000 * number + length, dtype=np.int32)
        columns = {"sequence": Column(tokens, np.array([0, length // 2, length]))}
        write_shard(folder / f"d/shard_{number:04d}", columns, storage_format, number=number, tokens=length)  # type: ignore[arg-type]
    return folder


class Counting(MemoryStore):
    """Records every range that is read."""

    ranges: list[tuple[int, int]]

    async def get(self, key: str, **options) -> bytes:
        if options.get("byte_range"):
            self.ranges.append(options["byte_range"])
        return await super().get(key, **options)


@pytest.fixture
async def bucket(tmp_path: Path) -> Counting:
    store = Counting("tokens")
    store.ranges = []
    await publish(make(tmp_path / "local"), store, "sub")
    return store


def cached(tmp_path: Path, max_bytes: int = 1 << 20) -> DiskCache:
    return DiskCache(tmp_path / "cache", max_bytes=max_bytes)


async def test_every_range_is_what_the_local_store_has(tmp_path: Path, bucket: Counting) -> None:
    local = MmapStore()
    local.load(tmp_path / "local")
    store, _ = await open_bucket_store([bucket], "sub", cached(tmp_path))

    def compare() -> None:
        assert (len(store), store.num_records) == (len(local), 6)
        for begin in range(0, len(local), 7):
            for end in range(begin, len(local) + 1, 11):
                assert torch.equal(store.fetch(begin, end, "sequence"), local.fetch(begin, end, "sequence"))
        assert torch.equal(
            store.fetch_record(5, ["sequence"])["sequence"], local.fetch_record(5, ["sequence"])["sequence"]
        )

    await asyncio.to_thread(compare)
    # Whole blocks, each once.
    assert len(bucket.ranges) == 4 + 1 + 7
    assert all(start % BLOCK == 0 and stop - start <= BLOCK for start, stop in bucket.ranges)

    # Another process finds them on the disk.
    bucket.ranges.clear()
    again, _ = await open_bucket_store([bucket], "sub", cached(tmp_path))
    await asyncio.to_thread(again.fetch, 0, 153, "sequence")
    assert bucket.ranges == []
    assert again.sha256 == store.sha256


async def test_only_what_is_asked_for_is_fetched_and_ahead_of_time_if_wished(tmp_path: Path, bucket: Counting) -> None:
    store, reader = await open_bucket_store([bucket], "sub", cached(tmp_path))
    await reader.prefetch([*store.places("sequence", 20, 30), *store.places("sequence", 40, 52)])
    assert sorted(bucket.ranges) == [(0, 12), (64, 128), (128, 192), (192, 200)]
    bucket.ranges.clear()
    await asyncio.to_thread(store.fetch, 40, 52, "sequence")
    assert bucket.ranges == []


async def test_other_bytes_than_meta_says_are_never_returned(tmp_path: Path, bucket: Counting) -> None:
    key = "sub/d/shard_0000/sequence.bin"
    data = bytearray(await bucket.get(key, max_bytes=1000))
    data[70] ^= 1
    await bucket.put(key, bytes(data))
    store, _ = await open_bucket_store([bucket], "sub", cached(tmp_path))
    assert len(await asyncio.to_thread(store.fetch, 0, 16, "sequence")) == 16  # of a sound block
    with pytest.raises(DataError, match="bytes 64 to 128 do not match its meta"):
        await asyncio.to_thread(store.fetch, 16, 32, "sequence")
    good = Counting("replica")
    good.ranges = []
    await publish(tmp_path / "local", good, "sub")
    both, _ = await open_bucket_store([bucket, good], "sub", cached(tmp_path))
    assert (await asyncio.to_thread(both.fetch, 16, 32, "sequence")).tolist() == [*range(16, 32)]


async def test_damage_on_the_disk_is_noticed(tmp_path: Path, bucket: Counting) -> None:
    store, _ = await open_bucket_store([bucket], "sub", cached(tmp_path))
    await asyncio.to_thread(store.fetch, 0, 16, "sequence")
    (block,) = (tmp_path / "cache").glob("??/*")
    block.write_bytes(bytes(BLOCK))
    again, _ = await open_bucket_store([bucket], "sub", cached(tmp_path))
    assert (await asyncio.to_thread(again.fetch, 0, 16, "sequence")).tolist() == [*range(16)]
    assert len(bucket.ranges) == 2


async def test_the_bare_form_and_other_formats_are_named(tmp_path: Path, bucket: Counting) -> None:
    with pytest.raises(DataError, match=r"nor a meta\.json"):
        await open_bucket_store([bucket], "elsewhere", cached(tmp_path))
    await publish(make(tmp_path / "h5", "h5"), bucket, "h5")
    with pytest.raises(DataError, match="format h5 can't be read in parts"):
        await open_bucket_store([bucket], "h5", cached(tmp_path))
    await bucket.put("bare/meta.json", b'{"a": {"shape": [1], "dtype": "int32"}}')
    with pytest.raises(DataError, match="bare form"):
        await open_bucket_store([bucket], "bare", cached(tmp_path))


@pytest.fixture
def configured(served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The environment names the bucket."""
    keys = {"ACCESS_KEY_ID": served.bucket.access_key_id, "SECRET_ACCESS_KEY": served.bucket.secret_access_key}
    for access in ("READ", "WRITE"):
        for name, value in keys.items():
            monkeypatch.setenv(f"R2_DATASET_{access}_{name}", value)
    monkeypatch.setenv("R2_DATASET_ACCOUNT_ID", served.bucket.account_id)
    monkeypatch.setenv("R2_DATASET_BUCKET_NAME", served.bucket.name)
    monkeypatch.setenv("TPLR_S3_ENDPOINT", served.server.endpoint)
    monkeypatch.setenv("TPLR_CACHE_FOLDER", str(tmp_path / "cache"))
    return served


@pytest.mark.parametrize("storage_format", ["bin", "h5", "jsonl"])
async def test_programs_without_a_loop(tmp_path: Path, configured, storage_format: str) -> None:
    folder = make(tmp_path / "store", storage_format)
    await publish(folder, configured.store, "tokens")

    def items(dataset) -> list[list[int]]:
        return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]

    def read() -> None:
        expected = items(DatasetFactory.load("seq", folder, 10))
        with BucketReader("s3://books/tokens") as reader:
            store = reader.open()
            assert isinstance(store, BucketStore) is (storage_format == "bin")
            assert items(DatasetFactory.load("seq", None, 10, store=store)) == expected
        assert len([*(tmp_path / "cache/blocks").glob("??/*")]) > 1
        dataset = DatasetFactory.load("seq", "s3://books/tokens", 10)
        workers = DataLoader(dataset, 4, num_workers=1)  # a fork, which opens new connections
        assert [row for batch in workers for row in batch["input_ids"].tolist()] == expected
        if storage_format == "bin":
            copy = pickle.loads(pickle.dumps(dataset))
            assert items(copy) == expected
            for one in (copy, dataset):
                one.store.stream("sequence")._segments[0]._read.__self__.__exit__()

    await asyncio.to_thread(read)


@pytest.mark.parametrize("storage_format", ["bin", "h5", "jsonl"])
async def test_one_shard_is_a_store(tmp_path: Path, configured, storage_format: str) -> None:
    folder = make(tmp_path / "store", storage_format)
    await publish(folder, configured.store, "tokens")

    def read(url: str) -> list[int]:
        with BucketReader(url) as reader:
            return reader.open().fetch(0, 50, "sequence").tolist()

    for url in ("s3://books/tokens/d/shard_0000", "s3://books/tokens/d/shard_0000/"):
        assert await asyncio.to_thread(read, url) == [*range(50)]


async def test_stores_are_uploaded_and_verified_as_datasets_are(tmp_path: Path, configured, capsys) -> None:
    folder = make(tmp_path / "store")
    assert await asyncio.to_thread(main, ["data", "upload", str(folder), "--subfolder", "t"]) == 0
    assert await asyncio.to_thread(main, ["data", "verify", "--subfolder", "t"]) == 0
    await configured.store.put("t/d/shard_0001/sequence.bin", b"x" * 12)
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["data", "verify", "--subfolder", "t"]) != 0
    assert "shard_0001/sequence.bin" in capsys.readouterr().out
