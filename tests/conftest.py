"""Fixtures of all tests: stable failure reports, a small parquet dataset, a byte tokenizer and a served bucket."""

import gc
import io
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import settings

from tplr.schemas import Bucket
from tplr.storage import MemoryStore, S3Connections, S3Store
from tplr.testing.s3server import Rules, Server, serve

SUBFOLDER = "sub/set"
# Hypothesis would fail examples that take more than 0.2 s, which only says that the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imported and collected objects stay alive: garbage collection over them takes a sixth of the time.

    It also leaves them out while tests run, where each full collection would take most of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


LONG_SECONDS = 180  # a test with at least this timeout counts as long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes, each of which runs file after file, begin with long tests: none is left for the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    marks = [(item.path, item.get_closest_marker("timeout")) for item in items]
    long = {path for path, mark in marks if mark and mark.args and mark.args[0] >= LONG_SECONDS}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPLR_CACHE_FOLDER", str(tmp_path_factory.mktemp("cache")))
        yield


@dataclass
class Library:
    """A dataset on its owner's machine. ``rows`` has the texts of each config, ``objects`` the files by key."""

    address: str = "exact"
    rows: dict[str, list[str]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, dict] = field(default_factory=dict)

    def add(self, config: str, *shards: list[int], **options) -> None:
        """Add a config of shards, each with row groups of these sizes."""
        texts, entries = self.rows.setdefault(config, []), []
        for i, groups in enumerate(shards):
            rows = [f"{config} {len(texts) + j} " + "x" * (j % 7) for j in range(sum(groups))]
            path, data = f"{config}/{i}.parquet", parquet(rows, groups, **options)
            texts += rows
            self.objects[f"{SUBFOLDER}/{path}"] = data
            entries.append({"path": f"any-bucket/{SUBFOLDER}/{path}", "num_rows": len(rows), "byte_size": len(data)})
        self.sizes[config] = {"split": "train", "total_rows": len(texts), "shards": entries}

    async def put_into(self, store) -> None:
        metadata = {"configs": [{"config_name": name} for name in self.sizes], "address": self.address}
        self.objects[f"{SUBFOLDER}/_metadata.yaml"] = yaml.safe_dump(metadata).encode()
        self.objects[f"{SUBFOLDER}/_shard_sizes.json"] = json.dumps(self.sizes).encode()
        for key, data in self.objects.items():
            await store.put(key, data)


def parquet(rows: list[str], groups: list[int], **options) -> bytes:
    table = pa.table({"id": list(range(len(rows))), "text": pa.array(rows, pa.string()), "url": ["u"] * len(rows)})
    sink = io.BytesIO()
    start = 0
    with pq.ParquetWriter(
        sink, table.schema, **{"compression": "zstd", "write_page_checksum": True, **options}
    ) as writer:
        for size in groups:
            writer.write_table(table.slice(start, size), row_group_size=max(size, 1))
            start += size
    return sink.getvalue()


@pytest.fixture
def library() -> Library:
    library = Library()
    library.add("even", [120, 120, 120])
    library.add("ragged", [50, 7, 110], [3], [200, 31])
    return library


@pytest.fixture
async def store(library) -> MemoryStore:
    store = MemoryStore("books")
    await library.put_into(store)
    return store


@pytest.fixture(scope="session")
def tokenizer():
    """One token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")


@dataclass
class Served:
    """A bucket on an R2-like server, and every request that reached it, as ``METHOD /path?query``."""

    server: Server
    bucket: Bucket
    store: S3Store
    requests: list[str]

    def seen(self, method: str, part: str = "") -> list[str]:
        return [request for request in self.requests if request.startswith(f"{method} ") and part in request]


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """R2's rules, except for the wait between two writes of a key."""
    bucket = Bucket(name="books", account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)
    keys = {bucket.access_key_id: {"secret": bucket.secret_access_key, "buckets": {"books": "read-write"}}}
    async with (
        serve(tmp_path / "s3", keys, rules=Rules(one_write_per_second=False)) as server,
        S3Connections(server.endpoint) as connections,
    ):
        requests: list[str] = []
        take = server.faults.take

        def seen(method: str, target: str):
            requests.append(f"{method} {target}")
            return take(method, target)

        monkeypatch.setattr(server.faults, "take", seen)
        yield Served(server, bucket, connections.store(bucket), requests)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A report parses the failed test's source. In Python 3.11 this fails with a SystemError, which ends the whole
    run, if garbage collection in between logs a traceback of a destroyed object, because that also parses source."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
