"""Pages from real parquet files: the right rows, few requests, and an error where file and manifest differ."""

import asyncio
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tplr.errors import DataError, ObjectNotFound, StoreUnavailable
from tplr.pages import reader as page_reader
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.manifest import ParquetShard
from tplr.pages.page_draw import GroupRows
from tplr.pages.reader import BytesRead, Footers, PageReader, _Chunk, _decode, _parse
from tplr.schemas import PageRef
from tplr.storage import MemoryStore
from tplr.storage.replicas import Replicas

SUBFOLDER = "sub/set"


class Watched(MemoryStore):
    """Records each request; ``spoil`` may change the bytes of an answer or raise."""

    def __init__(self) -> None:
        super().__init__("watched")
        self.requests: list[tuple[str, str, int]] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda key, data: data

    async def head(self, key):
        self.requests.append(("head", key, 0))
        return await super().head(key)

    async def get_piece(self, key, *arguments, **more):
        info, data = await super().get_piece(key, *arguments, **more)
        data = self.spoil(key, data)
        self.requests.append(("end", key, len(data)))
        return info, data

    async def get(self, key, **arguments):
        data = self.spoil(key, await super().get(key, **arguments))
        self.requests.append(("get", key, len(data)))
        return data


async def open_reader(library, store, rows_per_page=100, deadline_seconds=20.0, footers=None) -> PageReader:
    await library.put_into(store)
    replicas = Replicas([store], deadline_seconds=deadline_seconds, pause_seconds=0.01)
    manifest = await fetch_manifest(replicas, SUBFOLDER)
    return PageReader(manifest, SUBFOLDER, replicas, rows_per_page, footers=footers)


async def test_every_page_has_exactly_its_rows(library, store):
    reader = await open_reader(library, store, rows_per_page=60)
    for config, rows in library.rows.items():
        for row in range(0, len(rows) - 59, 7):
            assert await reader.texts(PageRef(config, row, "train")) == rows[row : row + 60], (config, row)


async def test_group_average_reads_what_documented_networks_read(library, store):
    library.address = "group-average"
    library.add("documented", [1000, 1000, 500])
    library.add("hollow", [200, 0, 100])
    reader = await open_reader(library, store)
    rows = library.rows["documented"]
    assert await reader.texts(PageRef("documented", 900, "train")) == rows[1067:1167]
    assert await reader.texts(PageRef("documented", 2499, "train")) == rows[2000:2100]
    assert await reader.texts(PageRef("hollow", 130, "train")) == []


async def test_only_the_text_of_one_row_group_is_fetched_and_the_footer_once(library):
    store = Watched()
    reader = await open_reader(library, store)
    metadata = pq.read_metadata(pa.BufferReader(library.objects[f"{SUBFOLDER}/even/0.parquet"]))
    chunk = metadata.row_group(1).column(1)
    store.requests.clear()
    pages = [PageRef("even", row, "train") for row in (120, 125, 140)]
    await asyncio.gather(*map(reader.texts, pages))
    verbs = [(verb, size) for verb, _, size in store.requests]
    assert sorted(verb for verb, _ in verbs) == ["end", "get", "get", "get"]
    assert [size for _, size in verbs].count(chunk.total_compressed_size) == 3


async def test_a_long_column_chunk_is_fetched_in_pieces(library):
    store = Watched()
    await library.put_into(store)
    manifest = await fetch_manifest(Replicas([store]), SUBFOLDER)
    reader = PageReader(manifest, SUBFOLDER, Replicas([store]), request_bytes=100)
    store.requests.clear()
    assert await reader.texts(PageRef("even", 125, "train")) == library.rows["even"][125:225]
    sizes = [size for verb, _, size in store.requests if verb == "get"]
    assert len(sizes) > 2
    assert max(sizes) == 100
    assert reader.bytes_read.text == sum(sizes)


async def test_a_footer_larger_than_the_guess_is_fetched_whole_and_the_next_guess_is_better(library):
    store = Watched()
    reader = await open_reader(library, store)
    reader._footers.guess = 64
    library.add("twin", [120, 120, 120])
    store.requests.clear()
    assert await reader.texts(PageRef("even", 3, "train")) == library.rows["even"][3:103]
    assert [verb for verb, *_ in store.requests] == ["end", "get", "get"]
    store.requests.clear()
    assert await reader.texts(PageRef("ragged", 171, "train")) == library.rows["ragged"][171:271]
    assert [verb for verb, *_ in store.requests] == ["end", "get"]


async def test_readers_share_footers_and_bytes_read_are_counted(library):
    store = Watched()
    footers = Footers()
    readers = [await open_reader(library, store, footers=footers) for _ in range(2)]
    store.requests.clear()
    for reader in readers:
        assert await reader.texts(PageRef("even", 0, "train")) == library.rows["even"][:100]
    assert [verb for verb, *_ in store.requests] == ["end", "get", "get"]
    sizes = [size for _, _, size in store.requests]
    assert readers[0].bytes_read == BytesRead(text=sizes[1], footers=sizes[0])
    assert readers[1].bytes_read == BytesRead(text=sizes[2], footers=0)


async def test_footers_kept_are_bounded(library, store):
    footers = Footers(bytes_kept=1)
    reader = await open_reader(library, store, rows_per_page=3, footers=footers)
    for row in (0, 167, 170, 0):
        assert await reader.texts(PageRef("ragged", row, "train")) == library.rows["ragged"][row : row + 3]
    assert len(footers._kept) == 1
    assert not reader._fetching


@pytest.mark.parametrize("options", [{"compression": "none"}, {"use_dictionary": False}, {"data_page_size": 64}])
async def test_other_ways_to_write_parquet(library, store, options):
    library.add("other", [130, 20], **options)
    reader = await open_reader(library, store)
    assert await reader.texts(PageRef("other", 33, "train")) == library.rows["other"][33:133]


async def test_rows_without_text_are_empty(library, store):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a", None, "b"] * 40}), sink)
    library.sizes["gaps"] = {"total_rows": 120, "shards": [{"path": "gaps/0.parquet", "num_rows": 120}]}
    library.objects[f"{SUBFOLDER}/gaps/0.parquet"] = sink.getvalue().to_pybytes()
    reader = await open_reader(library, store, rows_per_page=4)
    assert await reader.texts(PageRef("gaps", 0, "train")) == ["a", "", "b", "a"]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_a_damaged_footer_is_an_error_and_never_ends_the_process(library):
    key = f"{SUBFOLDER}/even/0.parquet"
    data = library.objects[key]
    shard = ParquetShard("even/0.parquet", 360)
    metadata = pq.read_metadata(pa.BufferReader(data))
    footer = _parse(key, data, shard, etag="", size=len(data))
    for group in range(3):
        chunk = metadata.row_group(group).column(1)
        start = chunk.dictionary_page_offset
        assert footer.text_range(group) == (start, start + chunk.total_compressed_size)
    errors = 0
    for at in range(len(data) - 8 - metadata.serialized_size, len(data) - 8):
        try:
            footer = _parse(key, flipped(data, at, at % 8), shard, etag="", size=len(data))
            start, stop = footer.text_range(1)
            _decode(key, footer, GroupRows(1, 0, 9), _Chunk(start, data[start:stop]))
        except (DataError, pa.ArrowException, OSError, UnicodeDecodeError):
            errors += 1
    assert errors > 100


async def test_text_that_is_not_utf8_is_an_error_of_the_file(library):
    rows = pa.array([b"bad \xff byte" if i == 150 else b"good" for i in range(400)], pa.binary())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(400, *rows.buffers()[1:])}), sink)
    library.sizes["even"] = {"total_rows": 400, "shards": [{"path": "even/0.parquet", "num_rows": 400}]}
    library.objects[f"{SUBFOLDER}/even/0.parquet"] = sink.getvalue().to_pybytes()
    reader = await open_reader(library, Watched())
    assert await reader.texts(PageRef("even", 20, "train")) == ["good"] * 100
    with pytest.raises(DataError, match=r"even/0\.parquet, rows 100 to 200: not UTF-8: .*0xff"):
        await reader.texts(PageRef("even", 100, "train"))


def wrong_rows(library):
    library.sizes["even"]["shards"][0]["num_rows"] += 1
    library.sizes["even"]["total_rows"] += 1


def wrong_size(library):
    library.sizes["even"]["shards"][0]["byte_size"] += 1


def no_parquet(library):
    library.objects[f"{SUBFOLDER}/even/0.parquet"] = b"x" * library.sizes["even"]["shards"][0]["byte_size"]


def empty(library):
    library.objects[f"{SUBFOLDER}/even/0.parquet"] = b""


def huge_footer(library):
    data = library.objects[f"{SUBFOLDER}/even/0.parquet"]
    library.objects[f"{SUBFOLDER}/even/0.parquet"] = data[:-8] + b"\xff\xff\xff\x7fPAR1"


def torn_footer(library):
    data = bytearray(library.objects[f"{SUBFOLDER}/even/0.parquet"])
    data[-200:-8] = bytes(192)
    library.objects[f"{SUBFOLDER}/even/0.parquet"] = bytes(data)


def replaced(library, table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    library.objects[f"{SUBFOLDER}/even/0.parquet"] = data = sink.getvalue().to_pybytes()
    library.sizes["even"]["shards"][0]["byte_size"] = len(data)


def no_text_column(library):
    replaced(library, pa.table({"body": ["a"] * 360}))


def numbers(library):
    replaced(library, pa.table({"text": [1] * 360}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_rows, "has 360 rows, the manifest says 361"),
        (wrong_size, "the manifest says .*do not match"),
        (no_parquet, "is not a parquet file"),
        (empty, "is empty, so it is not a parquet file"),
        (huge_footer, "a footer of 2147483655 bytes"),
        (torn_footer, "footer can't be read"),
        (no_text_column, "no column 'text', only body"),
        (numbers, "'text' holds int64"),
    ],
)
async def test_a_file_that_contradicts_the_manifest_ends_it_at_once(library, damage, message):
    store = Watched()
    damage(library)
    reader = await open_reader(library, store)
    with pytest.raises(DataError, match=message) as caught:
        await reader.texts(PageRef("even", 0, "train"))
    assert "sub/set/even/0.parquet" in str(caught.value)
    assert [verb for verb, key, _ in store.requests if key.endswith(".parquet")].count("end") <= 1


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (60, "the text of row group 0 takes \\d+ bytes of memory, at most 60 are allowed: write smaller row groups"),
        (500_000, "rows 7 to 107 of row group 0 take \\d+ bytes"),
    ],
)
async def test_texts_that_take_too_much_memory_are_refused(library, store, monkeypatch, limit, says):
    replaced(library, pa.table({"text": ["a" * 30_000] * 360}))
    reader = await open_reader(library, store)
    assert await reader.texts(PageRef("even", 7, "train")) == ["a" * 30_000] * 100
    monkeypatch.setattr(page_reader, "_MAX_TEXT_BYTES", limit)
    with pytest.raises(DataError, match=f"sub/set/even/0.parquet: {says}"):
        await reader.texts(PageRef("even", 7, "train"))


async def test_a_missing_shard_is_named(library):
    del library.objects[f"{SUBFOLDER}/even/0.parquet"]
    reader = await open_reader(library, Watched())
    with pytest.raises(ObjectNotFound, match=r"sub/set/even/0\.parquet"):
        await reader.texts(PageRef("even", 0, "train"))


async def test_a_flipped_bit_is_noticed_and_read_again(library):
    store = Watched()
    library.add("bits", [360], compression="none", use_dictionary=False)
    reader = await open_reader(library, store)
    page, rows = PageRef("bits", 5, "train"), library.rows["bits"]
    left = 1

    def flip(key: str, data: bytes) -> bytes:
        nonlocal left
        at = data.find(b"bits 50 ")
        if not left or at < 0 or data.endswith(b"PAR1"):
            return data
        left -= 1
        return data[:at] + b"c" + data[at + 1 :]

    store.spoil = flip
    assert await reader.texts(page) == rows[5:105]
    assert left == 0
    left = 10**6
    with pytest.raises(StoreUnavailable, match=r"bits/0\.parquet: changed or damaged"):
        await (await open_reader(library, store, deadline_seconds=0.5)).texts(page)


async def test_another_version_of_a_file_is_never_read_by_an_old_footer(library):
    store = Watched()
    reader = await open_reader(library, store)
    await reader.texts(PageRef("even", 0, "train"))
    key = f"{SUBFOLDER}/even/0.parquet"
    await store.put(key, library.objects[key] + b"more")  # every range of the old footer still exists
    with pytest.raises(DataError, match="the manifest says"):
        await reader.texts(PageRef("even", 0, "train"))


async def test_a_file_replaced_meanwhile_is_checked_anew(library):
    store = Watched()
    del library.sizes["even"]["shards"][0]["byte_size"]
    reader = await open_reader(library, store)
    page, key, rows = PageRef("even", 100, "train"), f"{SUBFOLDER}/even/0.parquet", library.rows["even"]
    assert await reader.texts(page) == rows[100:200]

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": rows}), sink, row_group_size=77)
    await store.put(key, sink.getvalue().to_pybytes())
    assert await reader.texts(page) == rows[100:200]

    pq.write_table(pa.table({"text": rows[1:]}), sink := pa.BufferOutputStream())
    await store.put(key, sink.getvalue().to_pybytes())
    with pytest.raises(DataError, match="has 359 rows"):
        await reader.texts(page)
