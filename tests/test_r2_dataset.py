"""The loader as its users know it, against an R2-like server: the environment gives everything."""

import asyncio
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tplr import config
from tplr.data.replicas import Replicas
from tplr.errors import AccessDenied, ConfigError, DataError
from tplr.localnet.s3server import Delay, FlipBit, Reset, Status, Truncate, serve
from tplr.r2_dataset import R2DatasetLoader
from tplr.schemas import PageRef
from tplr.storage import S3Connections

READ_KEY, WRITE_KEY, SECRET = "a" * 32, "b" * 32, "c" * 64
ROWS = {name: [f"{name} row {i}" for i in range(count)] for name, count in [("first", 700), ("second", 250)]}


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte."""
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")


def dataset_objects(bucket: str) -> dict[str, bytes]:
    objects, sizes = {}, {}
    for name, rows in ROWS.items():
        pq.write_table(pa.table({"text": rows}), sink := io.BytesIO(), row_group_size=200, write_page_checksum=True)
        objects[f"some-set/{name}/0.parquet"] = sink.getvalue()
        shard = {"path": f"{bucket}/some-set/{name}/0.parquet", "num_rows": len(rows), "byte_size": None}
        sizes[name] = {"split": "train", "total_rows": len(rows), "shards": [shard]}
    metadata = "configs:\n- config_name: default\n- config_name: second\n- config_name: first\naddress: exact\n"
    objects["some-set/_metadata.yaml"] = metadata.encode()
    objects["some-set/_shard_sizes.json"] = json.dumps(sizes).encode()
    return objects


@pytest.fixture
async def server(tmp_path, monkeypatch):
    keys = {
        READ_KEY: {"secret": SECRET, "buckets": {"books": "read", "mirror": "read"}},
        WRITE_KEY: {"secret": SECRET, "buckets": {"books": "read-write", "mirror": "read-write"}},
    }
    async with serve(tmp_path / "s3", keys) as server:
        for name in [name for name in config.process_environment() if name.startswith(("R2_", "TPLR_"))]:
            monkeypatch.delenv(name)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TPLR_S3_ENDPOINT", server.endpoint)
        monkeypatch.setenv("TPLR_DATASET_SUBFOLDER", "some-set")
        monkeypatch.setenv("TPLR_CACHE_FOLDER", str(tmp_path / "cache"))
        monkeypatch.setenv("R2_DATASET_ACCOUNT_ID", "0" * 32)
        monkeypatch.setenv("R2_DATASET_BUCKET_NAME", "books")
        monkeypatch.setenv("R2_DATASET_READ_ACCESS_KEY_ID", READ_KEY)
        monkeypatch.setenv("R2_DATASET_READ_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("R2_DATASET_WRITE_ACCESS_KEY_ID", WRITE_KEY)
        monkeypatch.setenv("R2_DATASET_WRITE_SECRET_ACCESS_KEY", SECRET)
        async with S3Connections(server.endpoint) as connections:
            store = connections.store(config.bucket_for("dataset", "write"))
            for key, data in dataset_objects("books").items():
                await store.put(key, data)
        yield server


async def test_pages_and_batches(server, tokenizer):
    pages = await R2DatasetLoader.next_pages(offset=6, n_pages=3, seed=7)
    assert pages == await R2DatasetLoader.next_pages(6, 3, 7, num_rows_per_page=100)
    assert all(isinstance(page, tuple) and page[2] == "train" for page in pages)
    loader = await R2DatasetLoader.create(
        batch_size=4, sequence_length=16, pages_info=pages, tokenizer=tokenizer, pack_samples=True
    )
    batches = list(loader)
    assert all(batch.shape == (4, 16) for batch in batches)
    text = "".join(row + "<eos>" for page in pages for row in ROWS[page.config][page.row : page.row + 100])
    tokens = np.concatenate(batches).ravel()
    assert len(tokens) == len(tokenizer(text)["input_ids"]) // 64 * 64
    assert text.startswith(tokenizer.decode(tokens))


async def test_iteration_begins_anew_each_time(server, tokenizer):
    loader = await R2DatasetLoader.create(2, 16, [("first", 0, "train")], tokenizer)
    whole = [batch.copy() for batch in loader]
    assert len(whole) > 3
    next(iter(loader))[:] = 0  # a batch is the caller's own
    again = list(loader)
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))
    assert loader.get_page_names() == ["first_0_train"]
    assert list(R2DatasetLoader(batch_size=2, sequence_length=16)) == []


async def test_unpacked(server, tokenizer):
    loader = await R2DatasetLoader.create(1, 32, [("first", 5, "train")], tokenizer, pack_samples=False)
    assert [tokenizer.decode(batch[0], skip_special_tokens=True) for batch in loader] == ROWS["first"][5:105]


async def test_configs_come_in_the_manifests_order(server):
    configs = await R2DatasetLoader.fetch_dataset_configs()
    assert [(name, entry["num_rows"], entry["split"]) for name, entry in configs.items()] == [
        ("second", 250, "train"),
        ("first", 700, "train"),
    ]


async def test_shard_paths_open_with_the_file_system(server):
    sizes, metadata = await R2DatasetLoader._load_r2_metadata()
    assert [entry["config_name"] for entry in metadata["configs"]] == ["second", "first"]

    def rows() -> list[str]:
        with R2DatasetLoader._get_fs().open(sizes["first"]["shards"][0]["path"], "rb") as file:
            return pq.ParquetFile(file).read_row_group(1, columns=["text"]).column(0).to_pylist()

    assert await asyncio.to_thread(rows) == ROWS["first"][200:400]


async def test_replicas_take_turns_and_stand_in_for_each_other(server, tokenizer, monkeypatch):
    pair = {"read": {"access_key_id": READ_KEY, "secret_access_key": SECRET}}
    replicas = [
        {"account_id": "0" * 32, "name": "books", "credentials": pair},
        {"account_id": "1" * 32, "name": "mirror", "credentials": pair},  # has none of the objects
    ]
    monkeypatch.setenv("R2_DATASET_BUCKET_LIST", json.dumps(replicas))
    loader = await R2DatasetLoader.create(1, 16, [("first", i, "train") for i in range(4)], tokenizer)
    assert len(list(loader)) > 0
    assert R2DatasetLoader._get_fs() is not R2DatasetLoader._get_fs()


@pytest.mark.parametrize(
    "fault", [Status(503), Status(429, "TooManyRequests"), Reset(), Truncate(50), FlipBit(60), Delay(0.1)]
)
async def test_a_passing_fault_changes_nothing(server, tokenizer, fault, monkeypatch):
    monkeypatch.setitem(Replicas.__init__.__kwdefaults__, "pause_seconds", 0.01)
    await R2DatasetLoader.next_pages(0, 1, 0)
    server.faults.add(r"^GET /books/some-set/first/0", fault, times=2)
    loader = await R2DatasetLoader.create(1, 32, [("first", 5, "train")], tokenizer, pack_samples=False)
    assert [tokenizer.decode(batch[0], skip_special_tokens=True) for batch in loader] == ROWS["first"][5:105]


async def test_a_page_beyond_the_dataset_is_a_value_error(server, tokenizer):
    with pytest.raises(ValueError, match="Could not find shard for page 9999") as caught:
        await R2DatasetLoader.create(1, 16, [PageRef("first", 9999, "train")], tokenizer)
    assert isinstance(caught.value, DataError)


async def test_wrong_credentials_and_none(server, monkeypatch):
    monkeypatch.setattr(R2DatasetLoader, "_manifests", {})
    monkeypatch.setenv("R2_DATASET_READ_SECRET_ACCESS_KEY", "d" * 64)
    with pytest.raises(AccessDenied) as caught:
        await R2DatasetLoader.next_pages(0, 1, 0)
    assert "d" * 8 not in str(caught.value)
    monkeypatch.delenv("R2_DATASET_READ_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="R2_DATASET_READ_SECRET_ACCESS_KEY is missing"):
        await R2DatasetLoader.next_pages(0, 1, 0)


def test_documented_constants():
    assert R2DatasetLoader.DATASET_SUBFOLDER == "HuggingFaceFW_fineweb-edu-score-2"
    assert (R2DatasetLoader.CF_REGION_NAME, R2DatasetLoader.PREFETCH_SIZE) == ("enam", 3)
    assert (R2DatasetLoader.MAX_CONCURRENT_REQUESTS, R2DatasetLoader.BATCH_SIZE) == (8, 128)
    assert R2DatasetLoader.READ_BUFFER_SIZE == 4 * 2**20
