"""The loader's public interface against an R2-like server: all settings come from the environment."""

import asyncio
import gc
import hashlib
import io
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tplr import config
from tplr.errors import AccessDenied, ConfigError, DataError, StateError, StoreError
from tplr.pages.dataset import PageDataset
from tplr.pages.token_cache import TokenCache
from tplr.r2_dataset import R2DatasetLoader
from tplr.resources import LocalMachine, Resources
from tplr.schemas import Bucket, PageRef
from tplr.storage import S3Connections
from tplr.storage.replicas import Replicas
from tplr.testing.s3server import Delay, FlipBit, Reset, Status, Truncate, serve

READ_KEY, WRITE_KEY, SECRET = "a" * 32, "b" * 32, "c" * 64
ROWS = {name: [f"{name} row {i}" for i in range(count)] for name, count in [("first", 700), ("second", 250)]}


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
        for name in [name for name in config.Environment.read().variables if name.startswith(("R2_", "TPLR_"))]:
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
        monkeypatch.setattr(R2DatasetLoader, "token_cache", TokenCache())
        async with S3Connections(server.endpoint) as connections:
            store = connections.store(config.Environment.read().bucket("dataset", "write"))
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
    batches = await asyncio.to_thread(list, loader)  # the server is in this loop: it must not be blocked
    assert all(batch.shape == (4, 16) for batch in batches)
    text = "".join(row + "<eos>" for page in pages for row in ROWS[page.config][page.row : page.row + 100])
    tokens = np.concatenate(batches).ravel()
    assert len(tokens) == len(tokenizer(text)["input_ids"]) // 64 * 64
    assert text.startswith(tokenizer.decode(tokens))


async def test_iteration_begins_anew_each_time(server, tokenizer):
    loader = await R2DatasetLoader.create(2, 16, [("first", 0, "train"), ("second", 7, "train")], tokenizer)
    whole = await batches(loader)
    assert len(whole) > 3
    (await anext(aiter(loader)))[:] = 0  # a batch is the caller's own
    assert_equal(await asyncio.to_thread(list, loader), whole)
    assert_equal(await asyncio.to_thread(list, loader), whole)
    assert loader.get_page_names() == ["first_0_train", "second_7_train"]
    assert list(R2DatasetLoader(batch_size=2, sequence_length=16)) == []


async def test_beginning_anew_waits_for_nothing_that_is_being_tokenized(server, tokenizer, monkeypatch):
    pages = [("first", row, "train") for row in (0, 100, 200)]
    async with await R2DatasetLoader.create(2, 16, pages, tokenizer) as loader:
        whole = await batches(loader)
        monkeypatch.setattr(R2DatasetLoader, "token_cache", TokenCache())
        tokenizing, done, real = threading.Event(), threading.Event(), PageDataset._encode

        def slow(self, *arguments):
            tokenizing.set()
            done.wait()
            return real(self, *arguments)

        monkeypatch.setattr(PageDataset, "_encode", slow)
        first = asyncio.create_task(anext(aiter(loader)))
        await asyncio.to_thread(tokenizing.wait)
        first.cancel()
        in_the_end = threading.Timer(5, done.set)  # otherwise a blocked loop would stay blocked for ever
        in_the_end.start()
        state = loader.state_dict() | {"page": 1}
        loader.load_state_dict(state)
        assert not done.is_set()
        in_the_end.cancel()
        done.set()
        loader.load_state_dict(state | {"page": 0})
        assert_equal(await batches(loader), whole)


@pytest.mark.parametrize("pack_samples", [True, False])
async def test_a_state_of_any_batch_goes_on_from_there(server, tokenizer, pack_samples):
    pages = [("second", 3, "train"), ("first", 599, "train"), ("second", 3, "train")]

    async def loader() -> R2DatasetLoader:
        return await R2DatasetLoader.create(7, 30, pages, tokenizer, pack_samples)

    async with await loader() as one:
        states = [one.state_dict()] + [one.state_dict() async for _ in one]
        whole = await batches(one)
    assert len(states) == len(whole) + 1 > 12
    async with await loader() as other:
        for i in (*range(0, len(states), 4), len(states) - 1):
            saved = json.loads(json.dumps(states[i]))
            for _ in range(2):  # a state can be used again
                other.load_state_dict(saved)
                assert other.state_dict() == saved == states[i]
                assert_equal(await batches(other), whole[i:])
        assert_equal(await batches(other), whole)  # and then it starts again


async def test_a_resumed_loader_reads_no_page_before(server, tokenizer, monkeypatch):
    pages = [("first", 0, "train"), ("second", 0, "train")]
    async with await R2DatasetLoader.create(2, 16, pages, tokenizer) as loader:
        while loader.state_dict()["page"] == 0:
            await anext(loader)
        state = loader.state_dict()
        await loader.aclose()
        monkeypatch.setattr(R2DatasetLoader, "token_cache", TokenCache())
        server.faults.add(r"^GET /books/some-set/first", Status(404, "NoSuchKey"), times=99)
        loader.load_state_dict(state)
        assert await batches(loader)


async def test_states_of_other_batches_are_refused(server, tokenizer):
    pages = [("first", 0, "train"), ("second", 0, "train")]
    loader = await R2DatasetLoader.create(2, 16, pages, tokenizer)
    state = loader.state_dict()
    for other in [(3, 16, pages, tokenizer), (2, 15, pages, tokenizer), (2, 16, pages[::-1], tokenizer)]:
        with pytest.raises(StateError, match="of other batches"):
            (await R2DatasetLoader.create(*other)).load_state_dict(state)
    for wrong in [{}, state | {"more": 1}, state | {"version": 2}, state | {"page": 3}, state | {"token": -1}, None]:
        with pytest.raises(StateError):
            loader.load_state_dict(wrong)


async def test_the_first_batch_comes_before_the_last_page(server, tokenizer):
    server.faults.add(r"^(HEAD|GET) /books/some-set/second", Status(503), times=10**6)
    pages = [("first", 0, "train"), ("second", 0, "train")]
    async with await R2DatasetLoader.create(2, 16, pages, tokenizer) as loader:
        for _ in range(5):
            await anext(loader)


async def test_two_loaders_share_files_and_closing_one_leaves_the_other_alone(server, tokenizer):
    pages = [("first", row, "train") for row in range(0, 600, 30)]
    one, other = [await R2DatasetLoader.create(1, 16, pages, tokenizer) for _ in range(2)]
    whole = await batches(other)
    aiter(other)
    for loader in (one, other):
        await anext(loader)
    await one.aclose()
    del one
    gc.collect()
    assert_equal([batch async for batch in Rest(other)], whole[1:])


async def test_closing_leaves_nothing(server, tokenizer, recwarn):
    threads, tasks = {*threading.enumerate()}, asyncio.all_tasks()
    sockets = sockets_to(server)
    pages = [("first", row, "train") for row in range(0, 600, 30)]
    loader = await R2DatasetLoader.create(1, 16, pages, tokenizer)
    await anext(loader)
    assert sockets_to(server) > sockets
    await loader.aclose()
    await loader.aclose()
    async with asyncio.timeout(30):  # the server, also in this process, takes a moment to notice the disconnect
        while not asyncio.all_tasks() <= tasks or not sockets_to(server) <= sockets:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")} <= threads
    assert await anext(loader) is not None  # it can continue at its position
    await loader.aclose()
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


async def test_batches_depend_on_nothing_but_the_pages(server, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setitem(Replicas.__init__.__kwdefaults__, "pause_seconds", 0.01)
    pages = await R2DatasetLoader.next_pages(offset=0, n_pages=9, seed=3)

    async def load(cache: TokenCache, requests: int = 8) -> list[np.ndarray]:
        monkeypatch.setattr(R2DatasetLoader, "token_cache", cache)
        monkeypatch.setattr(R2DatasetLoader, "MAX_CONCURRENT_REQUESTS", requests)
        monkeypatch.setattr(R2DatasetLoader, "_footers", {})
        async with await R2DatasetLoader.create(3, 20, pages, tokenizer) as loader:
            return await batches(loader)

    whole = await load(TokenCache(memory_bytes=0), requests=1)
    disk = TokenCache(memory_bytes=0, folder=tmp_path / "tokens")
    for fault in (None, Status(503), Truncate(70), Reset(), FlipBit(60)):
        if fault:
            server.faults.add(r"^GET /books/some-set/.*parquet", fault, times=3)
        assert_equal(await load(TokenCache(memory_bytes=0)), whole)
    assert_equal(await load(disk), whole)
    server.faults.add(r"parquet", Status(403, "AccessDenied"), times=10**6)
    assert_equal(await load(disk), whole)


async def test_another_process_makes_the_same_batches(server, tokenizer, tmp_path):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    code = (
        "import asyncio, hashlib, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from tplr.r2_dataset import R2DatasetLoader as Loader\n"
        "async def main():\n"
        "    pages = await Loader.next_pages(4, 5, 'a text')\n"
        "    tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1], eos_token='<eos>')\n"
        "    async with await Loader.create(3, 20, pages, tokenizer) as loader:\n"
        "        print(hashlib.sha256(b''.join([b.tobytes() async for b in loader])).hexdigest())\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, tmp_path / "tokenizer.json", env=os.environ | {"PYTHONHASHSEED": "1"}, stdout=-1
    )
    (output, _), here = await asyncio.gather(process.communicate(), digest(tokenizer))
    assert output.decode().strip() == here


async def digest(tokenizer) -> str:
    pages = await R2DatasetLoader.next_pages(4, 5, "a text")
    async with await R2DatasetLoader.create(3, 20, pages, tokenizer) as loader:
        return hashlib.sha256(b"".join([batch.tobytes() async for batch in loader])).hexdigest()


class Rest:
    """The rest of an iteration."""

    def __init__(self, iterator) -> None:
        self.iterator = iterator

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await anext(self.iterator)


async def batches(loader) -> list[np.ndarray]:
    return [batch async for batch in loader]


def assert_equal(some: list[np.ndarray], others: list[np.ndarray]) -> None:
    assert len(some) == len(others)
    assert all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


def sockets_to(server) -> int:
    """Return the open connections of this process's clients to the server."""
    port = int(server.endpoint.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(int(line.split()[2].split(":")[1], 16) == port and line.split()[3] == "01" for line in lines)


async def test_unpacked(server, tokenizer):
    loader = await R2DatasetLoader.create(1, 32, [("first", 5, "train")], tokenizer, pack_samples=False)
    assert [tokenizer.decode(batch[0], skip_special_tokens=True) async for batch in loader] == ROWS["first"][5:105]


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
    assert await batches(loader)
    assert R2DatasetLoader._get_fs() is not R2DatasetLoader._get_fs()


async def test_loaders_of_one_page_each_begin_with_another_replica(server, tokenizer, monkeypatch):
    """So a node that reads little at a time uses all buckets of the list."""
    pair = {"read": {"access_key_id": READ_KEY, "secret_access_key": SECRET}}
    names = ("books", "mirror")
    mirror = Bucket(name="mirror", account_id="1" * 32, access_key_id=WRITE_KEY, secret_access_key=SECRET)
    async with S3Connections(server.endpoint) as connections:
        store = connections.store(mirror)
        for key, data in dataset_objects("mirror").items():
            await store.put(key, data)
    replicas = [{"account_id": f"{i}" * 32, "name": name, "credentials": pair} for i, name in enumerate(names)]
    monkeypatch.setenv("R2_DATASET_BUCKET_LIST", json.dumps(replicas))
    await R2DatasetLoader.next_pages(0, 1, 0)
    watched = {name: server.faults.add(rf"^GET /{name}/some-set/.*parquet", Delay(0.0), times=99) for name in names}
    for row in range(6):
        assert await batches(await R2DatasetLoader.create(1, 16, [("first", row, "train")], tokenizer))
    assert all(one.left < 99 for one in watched.values())


@pytest.mark.parametrize(
    "fault", [Status(503), Status(429, "TooManyRequests"), Reset(), Truncate(50), FlipBit(60), Delay(0.1)]
)
async def test_a_passing_fault_changes_nothing(server, tokenizer, fault, monkeypatch):
    monkeypatch.setitem(Replicas.__init__.__kwdefaults__, "pause_seconds", 0.01)
    await R2DatasetLoader.next_pages(0, 1, 0)
    server.faults.add(r"^GET /books/some-set/first/0", fault, times=2)
    loader = await R2DatasetLoader.create(1, 32, [("first", 5, "train")], tokenizer, pack_samples=False)
    assert [tokenizer.decode(batch[0], skip_special_tokens=True) async for batch in loader] == ROWS["first"][5:105]


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
    assert R2DatasetLoader.MAX_CONCURRENT_REQUESTS == Resources.of(LocalMachine.here()).transfers >= 8
    assert (R2DatasetLoader.BATCH_SIZE, R2DatasetLoader.READ_BUFFER_SIZE) == (128, 4 * 2**20)


async def test_the_region_is_what_requests_are_signed_for(server, tokenizer, monkeypatch):
    monkeypatch.setattr(R2DatasetLoader, "_manifests", {})
    monkeypatch.setattr(R2DatasetLoader, "CF_REGION_NAME", "nowhere")
    with pytest.raises(StoreError, match=r"refused \(400\)"):  # the server accepts only R2's regions
        await R2DatasetLoader.next_pages(0, 1, 0)


async def test_the_read_buffer_bounds_each_request(server, tokenizer, monkeypatch):
    whole = await batches(await R2DatasetLoader.create(1, 16, [("first", 0, "train")], tokenizer))
    monkeypatch.setattr(R2DatasetLoader, "token_cache", TokenCache())
    monkeypatch.setattr(R2DatasetLoader, "READ_BUFFER_SIZE", 200)
    watched = server.faults.add(r"^GET /books/some-set/first/0", Delay(0.0), times=99)
    loader = await R2DatasetLoader.create(1, 16, [("first", 0, "train")], tokenizer)
    assert_equal(await batches(loader), whole)
    assert 99 - watched.left > loader.bytes_read.text / 200 > 4


async def test_the_batch_size_where_none_is_given(server, tokenizer, monkeypatch):
    monkeypatch.setattr(R2DatasetLoader, "BATCH_SIZE", 5)
    loader = await R2DatasetLoader.create(None, 16, [("first", 0, "train")], tokenizer)
    assert loader.batch_size == 5
    assert (await anext(aiter(loader))).shape == (5, 16)


@pytest.mark.parametrize(("requests", "ahead", "loaded"), [("1", 0, 1), ("1", 2, 3), ("4", 0, 4)])
@pytest.mark.parametrize("by", ["attribute", "variable"])
async def test_so_many_pages_wait_for_the_caller(server, tokenizer, monkeypatch, by, requests, ahead, loaded):
    if by == "attribute":
        monkeypatch.setattr(R2DatasetLoader, "MAX_CONCURRENT_REQUESTS", int(requests))
    else:
        monkeypatch.setenv("TPLR_TRANSFERS", requests)
    monkeypatch.setattr(R2DatasetLoader, "PREFETCH_SIZE", ahead)
    cache = TokenCache()
    monkeypatch.setattr(R2DatasetLoader, "token_cache", cache)
    pages = [("first", row, "train") for row in range(0, 600, 100)]
    async with await R2DatasetLoader.create(1, 16, pages, tokenizer):
        async with asyncio.timeout(10):
            while len(cache._kept) < loaded:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert len(cache._kept) == loaded


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 16), "batch_size: .* got 0"), ((2, 0), "sequence_length: .* got 0"), ((-1, 16), "batch_size: .* got -1")],
)
async def test_sizes_below_one_are_refused(server, tokenizer, sizes, message):
    with pytest.raises(ValueError, match=message):
        await R2DatasetLoader.create(*sizes, [("first", 0, "train")], tokenizer)
    with pytest.raises(ValueError, match=message):
        R2DatasetLoader(*sizes)


async def test_a_tokenizer_is_any_callable_with_an_eos_token(server):
    class Bytes:
        eos_token_id = 300

        def __call__(self, text, **arguments):
            assert arguments == arguments | {"truncation": True, "padding": False}
            return {"input_ids": list(text.encode())[: arguments["max_length"]]}

    async with await R2DatasetLoader.create(1, 16, [("first", 5, "train")], Bytes(), pack_samples=False) as loader:
        rows = [batch[0].tolist() async for batch in loader]
    assert [bytes(token for token in row if token < 300).decode() for row in rows] == ROWS["first"][5:105]
    tokenizer = Bytes()
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="no eos_token_id"):
        await R2DatasetLoader.create(1, 12, [("first", 5, "train")], tokenizer)


async def test_one_page_by_itself(server, tokenizer):
    loader = await R2DatasetLoader.create(1, 16, [("first", 5, "train")], tokenizer)
    tokens = await loader._process_page(("second", 3, "train"), asyncio.Semaphore(1))
    assert tokenizer.decode(tokens) == "".join(row + "<eos>" for row in ROWS["second"][3:103])


async def test_the_environment_is_read_once_a_call(server, tokenizer, monkeypatch):
    reads, read = [], config.Environment.read
    monkeypatch.setattr(config.Environment, "read", lambda: reads.append(1) or read())
    pages = await R2DatasetLoader.next_pages(0, 3, 0)
    assert len(reads) == 1
    loader = await R2DatasetLoader.create(1, 16, pages, tokenizer)
    assert await batches(loader)
    assert await batches(loader)
    assert len(reads) == 2
    await R2DatasetLoader.fetch_dataset_configs()
    R2DatasetLoader._get_fs()
    assert len(reads) == 4


async def test_threads_and_transfers_of_the_environment(server, tokenizer, monkeypatch, caplog):
    monkeypatch.setenv("TPLR_TRANSFERS", "3")
    monkeypatch.setenv("TPLR_DATA_THREADS", "5")
    caplog.set_level("INFO")
    for _ in range(2):
        assert await batches(await R2DatasetLoader.create(1, 16, [("first", 5, "train")], tokenizer))
    assert caplog.text.count(": 3 transfers, 5 data threads") == 1
    monkeypatch.setenv("TPLR_TRANSFERS", "none")
    with pytest.raises(ConfigError, match="TPLR_TRANSFERS is 'none'"):
        await R2DatasetLoader.next_pages(0, 1, 0)
