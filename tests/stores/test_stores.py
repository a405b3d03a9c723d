"""All kinds of store against plain lists: every range, every record, every mismatch of files and meta."""

import itertools
import json
import os
import pickle
import resource
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.errors import ConfigError, DataError
from tplr.stores.base import TokenStore
from tplr.stores.detect import detect_format
from tplr.stores.factory import StoreFactory
from tplr.stores.h5 import H5Store
from tplr.stores.mmap import MmapStore
from tplr.stores.writer import Column, describe, write_shard

FORMATS = ("bin", "h5", "jsonl")


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


@given(lists=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3), min_size=1, max_size=3))
@settings(max_examples=10)
def test_every_range_and_record_of_any_segmentation(tmp_path_factory: pytest.TempPathFactory, lists) -> None:
    flat = [x for shard in lists for record in shard for x in record]
    for storage_format in FORMATS:
        folder = tmp_path_factory.mktemp("store")
        shards = [
            {"a": column(shard, "int32"), "b": column([[-x for x in r] for r in shard], "int32")} for shard in lists
        ]
        store = opened(write(folder, storage_format, *shards))
        assert len(store) == store.token_count == len(flat)
        assert store.keys == ["a", "b"]
        for begin in range(len(flat)):
            for end in range(begin, len(flat) + 1):
                both = store.fetch(begin, end, ["a", "b"])
                assert both["a"].tolist() == flat[begin:end]
                assert both["b"].tolist() == [-x for x in flat[begin:end]]
                assert both["a"].dtype == torch.int32
        records = [record for shard in lists for record in shard]
        assert store.num_records == len(records)
        for i, record in enumerate(records):
            assert store.fetch_record(i, ["a"])["a"].tolist() == record
            assert store.fetch_record(i - len(records), ["a"])["a"].tolist() == record
        with pytest.raises(IndexError, match="record"):
            store.fetch_record(len(records), ["a"])


@pytest.mark.parametrize("storage_format", FORMATS)
def test_bounds_keys_and_order_of_calls(tmp_path: Path, storage_format: str) -> None:
    store = StoreFactory.create(storage_format, no_such_option=1)
    for call in (lambda: len(store), lambda: store.keys, lambda: store.fetch(0, 1, "a"), lambda: store.num_records):
        with pytest.raises((RuntimeError, ValueError)):
            call()
    with pytest.raises(RuntimeError, match="Store not loaded"):
        store.stream("a")
    write(tmp_path, storage_format, {"a": column([[1, 2, 3], [4, 5]], "int64"), "short": column([[7], []], "float32")})
    store.load(tmp_path)
    assert len(store) == 1  # the length that every key has
    for begin, end in ((0, 2), (-1, 1), (1, 1), (2, 3)):
        with pytest.raises(ValueError, match="out of bounds"):
            store.fetch(begin, end, "a")
    with pytest.raises(ValueError, match="expected begin <= end"):
        store.fetch(1, 0, "a")
    with pytest.raises(KeyError, match="no key 'b'; available: a, short"):
        store.fetch(0, 1, "b")
    assert store.fetch_record(0, ["a", "short"])["a"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("storage_format", FORMATS)
def test_records_of_several_lists(tmp_path: Path, storage_format: str) -> None:
    first = {"r": column([[1, 2], [], [3]], "int32", [0, 2, 3]), "x": column([[0.8], [0.1]], "float32")}
    second = {"r": column([[4], [5, 6]], "int32", [0, 2]), "x": column([[0.3]], "float32")}
    store = opened(write(tmp_path, storage_format, first, second))
    found = [store.fetch_record(i, ["r", "x"]) for i in range(store.num_records)]
    assert [[part.tolist() for part in record["r"]] for record in found] == [[[1, 2], []], [[3]], [[4], [5, 6]]]
    assert [record["x"].dtype for record in found] == [torch.float32] * 3
    assert [record["x"].tolist() for record in found] == [torch.tensor([x]).tolist() for x in (0.8, 0.1, 0.3)]


@pytest.mark.parametrize("storage_format", FORMATS)
def test_a_copy_for_a_worker_reads_the_same(tmp_path: Path, storage_format: str) -> None:
    store = opened(write(tmp_path, storage_format, {"a": column([[1, 2, 3]], "int32")}))
    assert pickle.loads(pickle.dumps(store)).fetch(0, 3, "a").tolist() == [1, 2, 3]


def test_writing_into_a_fetched_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    write(tmp_path, "bin", {"a": column([[1, 2, 3]], "int32")})
    opened(tmp_path).fetch(0, 3, "a").fill_(9)
    assert opened(tmp_path).fetch(0, 3, "a").tolist() == [1, 2, 3]
    assert opened(tmp_path).fetch(0, 3, "a").data_ptr() != 0


def test_hdf5_memory_is_shared_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "h5", {"a": column([[1, 2, 3]], "int32")})
    for share in (True, False):
        store = StoreFactory.create("h5", share_memory=share)
        store.load(tmp_path)
        (segment,) = store.stream("a")._segments
        assert segment._tensor.is_shared() is share


def test_hdf5_of_others_datasets_in_numeric_order_each_a_record(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data_0000.h5", "w") as file:
        for i in range(12):
            file.require_group("a").create_dataset(f"data_{i}", data=np.full(i % 3 + 1, i, np.int64))
    store = opened(tmp_path)
    assert isinstance(store, H5Store)
    assert store.fetch(0, len(store), "a").tolist() == [i for i in range(12) for _ in range(i % 3 + 1)]
    assert store.num_records == 12
    assert store.fetch_record(11, ["a"])["a"].tolist() == [11, 11, 11]


def test_hdf5_of_machines_with_another_byte_order(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, dtype in (("ids", ">i4"), ("rewards", ">f8")):
            file.create_group(name).create_dataset("data_0", data=np.array([1, 2, 300], dtype))
    store = opened(tmp_path)
    assert [store.stream(name).dtype.name for name in ("ids", "rewards")] == ["int32", "float64"]
    assert [store.fetch(0, 3, name).tolist() for name in ("ids", "rewards")] == [[1, 2, 300]] * 2


def test_a_mapped_store_has_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    keys = {"a": column([[1, 2, 3]], "int32"), "b": column([[4, 5, 6]], "uint16"), "c": column([[1, 0, 1]], "bool")}
    write(tmp_path, "bin", *[keys] * 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened_before = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened_before + 20, hard))
    try:
        store = opened(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.fetch(0, 90, "b").tolist() == [4, 5, 6] * 30
    store.fetch(0, 1, "a")[0] = 9  # in this process only
    assert store.fetch(0, 2, "a").tolist() == [9, 2]
    assert opened(tmp_path).fetch(0, 2, "a").tolist() == [1, 2]


@pytest.mark.parametrize("rich", [True, False], ids=["with meta.json", "without"])
def test_a_damaged_hdf5_file_is_named(tmp_path: Path, rich: bool) -> None:
    write(tmp_path, "h5", {"a": column([[1, 2, 3]], "int32"), "b": column([[1, 0, 1]], "bool")})
    file = tmp_path / "shard_0000/data_0000.h5"
    if not rich:
        (tmp_path / "shard_0000/meta.json").unlink()
    data, errors = file.read_bytes(), list[str]()
    for at in range(0, len(data), 13):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            H5Store(share_memory=False).load(tmp_path)
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 5
    assert all(str(file) in error for error in errors)


@pytest.mark.parametrize("share", [True, False])
def test_an_hdf5_file_that_claims_more_than_the_memory_is_named(tmp_path: Path, share: bool) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_group("a").create_dataset("data_0", shape=(2**60,), dtype="int32", chunks=(2**10,))
    with pytest.raises(DataError, match=r"data\.h5: a: can't allocate the memory for its 1152921504606846976 elements"):
        H5Store(share_memory=share).load(tmp_path)


@pytest.mark.parametrize("way", ["no data", "no chunks", "no compressed chunks", "links", "no keys"])
def test_an_hdf5_file_of_a_published_store_stores_what_it_declares(tmp_path: Path, way: str) -> None:
    size = 2**24
    with h5py.File(tmp_path / "data.h5", "w") as file:
        group = file.create_group("a")
        if way == "links":
            group["data_0"] = np.ones(size // 16, np.int8)
            for number in range(1, 16):
                group[f"data_{number}"] = group["data_0"]
        else:
            chunks = {} if way == "no data" else {"chunks": (2**16,)}
            group.create_dataset(
                "data_0", (size,), "int8", compression="gzip" if way == "no compressed chunks" else None, **chunks
            )
    assert len(opened(tmp_path)) == size  # a local file of another program may be sparse
    keys = {} if way == "no keys" else {"a": {"shape": [size], "dtype": "int8"}}
    (tmp_path / "meta.json").write_text(json.dumps(keys))
    says = (
        "no shard with a key" if way == "no keys" else rf"data\.h5 has \d+ bytes, and declares {size} bytes of numbers"
    )
    with pytest.raises((DataError, FileNotFoundError), match=says):
        opened(tmp_path)


@pytest.mark.parametrize("compressions", [0, 1, 2])
def test_an_hdf5_file_of_a_published_store_has_no_huge_chunk_of_few_numbers(tmp_path: Path, compressions: int) -> None:
    """A reader decompresses the whole chunk. Compressed twice, it takes a few KB."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((2**24,))
    for _ in range(compressions):
        settings.set_deflate(9)
    space = h5py.h5s.create_simple((3,), (h5py.h5s.UNLIMITED,))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        group = file.create_group("a")
        made = h5py.h5d.create(group.id, b"data_0", h5py.h5t.NATIVE_INT8, space, settings)
        h5py.Dataset(made)[:] = np.array([1, 2, 3], np.int8)
        group.create_dataset("data_1", (0,), "int8", maxshape=(None,), chunks=(2**30,))  # stores no chunk
    (tmp_path / "meta.json").write_text(json.dumps({"a": {"shape": [3], "dtype": "int8"}}))
    if compressions == 2:
        with pytest.raises(
            DataError, match=rf"has \d+ bytes, and declares {2**24} bytes of numbers, counted as a chunk"
        ):
            opened(tmp_path)
    else:
        assert opened(tmp_path).fetch(0, 3, "a").tolist() == [1, 2, 3]


def test_a_compressed_hdf5_file_of_a_published_store_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        group = file.create_group("a")
        group.create_dataset("data_0", data=np.ones(2**24, np.int8), chunks=(2**22,), compression=9, shuffle=True)
    (tmp_path / "meta.json").write_text(json.dumps({"a": {"shape": [2**24], "dtype": "int8"}}))
    assert (tmp_path / "data.h5").stat().st_size < 2**24 / 700
    assert opened(tmp_path).fetch(2**23, 2**23 + 3, "a").tolist() == [1, 1, 1]


def test_an_hdf5_file_of_many_datasets_is_read_into_little_more_memory_than_its_numbers_need(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        group = file.create_group("a")
        for number in range(256):
            group.create_dataset(f"data_{number}", data=np.ones(2**18, np.int8), chunks=(2**18,), compression=1)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory held now
    before = peak_memory()
    H5Store(share_memory=False).load(tmp_path)
    assert peak_memory() - before < 1.5 * 2**26


def test_an_hdf5_chunk_is_read_at_once(tmp_path: Path) -> None:
    """The chunks that h5py chooses hold parts of many rows: without a cache each part would be read alone."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        made = file.create_group("a").create_dataset("data_0", data=np.zeros((20_000, 64), np.int32), chunks=True)
        chunks = 20_000 / made.chunks[0] * 64 / made.chunks[1]
        assert made.chunks[1] < 64
    before = reads()
    H5Store(share_memory=False).load(tmp_path)
    assert reads() - before < 4 * chunks + 200


def reads() -> int:
    """Return how often this process has called ``read``."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("syscr:")]
    return int(line.split()[1])


def peak_memory() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_an_hdf5_dataset_without_a_shape_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_group("a").create_dataset("data_0", data=h5py.Empty("int8"))
    with pytest.raises(DataError, match=r"data\.h5: a: expected one or more datasets of one dtype, with a shape"):
        opened(tmp_path)


@pytest.mark.parametrize("way", ["key", "dataset", "soft", "raw", "virtual"])
def test_an_hdf5_file_with_data_of_another_file_is_refused(tmp_path: Path, way: str) -> None:
    with h5py.File(tmp_path / "other", "w") as other:
        other.create_group("a").create_dataset("data_0", data=np.arange(4))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        link = h5py.ExternalLink("other", "/a" if way == "key" else "/a/data_0")
        group = file.create_group("b" if way in ("key", "soft") else "a")
        if way == "key":
            file["a"] = link
        elif way == "dataset":
            group["data_0"] = link
        elif way == "soft":
            group["x"] = link
            file.create_group("a")["data_0"] = h5py.SoftLink("/b/x")
        elif way == "raw":
            group.create_dataset("data_0", shape=(9,), dtype="u1", external=[(str(tmp_path / "other"), 0, 9)])
        else:
            layout = h5py.VirtualLayout(shape=(4,), dtype="i8")
            layout[:] = h5py.VirtualSource("other", "a/data_0", shape=(4,))
            group.create_virtual_dataset("data_0", layout)
    with pytest.raises(DataError, match=r"data\.h5.*: the data of '(a|data_0)' are in another file: copy them"):
        H5Store().load(tmp_path / "data.h5")


def test_without_h5py_only_hdf5_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.h5").touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[h5\]'"):
        StoreFactory.create("h5").load(tmp_path)


def test_bare_meta_has_streams_and_no_records(tmp_path: Path) -> None:
    np.arange(6, dtype=np.int32).tofile(tmp_path / "a.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"a": {"shape": [2, 3], "dtype": "int32"}}))
    store = opened(tmp_path)
    assert isinstance(store, MmapStore)
    assert store.fetch(1, 5, "a").tolist() == [1, 2, 3, 4]
    assert store.num_records == 0
    with pytest.raises(DataError, match="no record offsets"):
        store.fetch_record(0, ["a"])


def test_the_rich_meta_describes_every_file(tmp_path: Path) -> None:
    meta = write_shard(tmp_path / "s", {"a": column([[1, 2], [3]], "int16")}, "bin", number=0, tokens=3)
    raw = json.loads((tmp_path / "s/meta.json").read_text())
    assert raw["a"] == {"shape": [3], "dtype": "int16", "offsets": [0, 2, 3]}
    assert raw["_store"] == meta.shard.model_dump()
    assert meta.shard.files == [describe(tmp_path / "s/a.bin")]
    assert (meta.shard.format, meta.shard.version, meta.shard.total_tokens, meta.shard.records) == ("bin", 1, 3, 2)


def test_a_shard_is_on_the_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, synced, sync = tmp_path / "s", [], os.fsync

    def record(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), shard.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_shard(shard, {"a": column([[1]], "int16")}, "bin", number=0, tokens=1)
    draft = next(path for path, _ in synced if path.name == "a.bin").parent
    assert sorted(synced[:-1]) == [(path, False) for path in (draft, draft / "a.bin", draft / "meta.json")]
    assert synced[-1] == (tmp_path, True)


def spoil_meta(folder: Path, **changes) -> None:
    path = folder / "shard_0000/meta.json"
    raw = json.loads(path.read_text())
    raw["a"] |= changes
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda f: (f / "shard_0000/a.bin").write_bytes(b"\0" * 19),
            "19 bytes; 5 elements of int32 take 20: it was truncated",
        ),
        (lambda f: (f / "shard_0000/a.bin").rename(f / "b.bin"), "a.bin is missing"),
        (lambda f: spoil_meta(f, dtype="int64"), "20 bytes; 5 elements of int64 take 40"),
        (lambda f: spoil_meta(f, dtype="int31"), "a.dtype|dtype 'int31' is not one of"),
        (lambda f: spoil_meta(f, shape=[-5]), "a.shape.0: Input should be greater"),
        (lambda f: spoil_meta(f, offsets=[0, 3, 4]), "offsets must ascend from 0 to 5"),
        (lambda f: spoil_meta(f, offsets=[0, 4, 3, 5]), "offsets must ascend"),
        (lambda f: spoil_meta(f, unheard="of"), "a.unheard: Extra inputs"),
        (lambda f: (f / "shard_0000/meta.json").write_text('{"a": {'), "meta.json is not JSON"),
        (lambda f: (f / "shard_0000/meta.json").write_text("[]"), "expected an object"),
    ],
)
def test_files_that_contradict_their_meta_are_refused(tmp_path: Path, spoil, says: str) -> None:
    write(tmp_path, "bin", {"a": column([[1, 2, 3], [4, 5]], "int32")})
    spoil(tmp_path)
    with pytest.raises(DataError, match=says):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["old_meta.json", "tokenizer_meta.json"])
def test_only_a_file_named_meta_json_is_a_shard(tmp_path: Path, name: str) -> None:
    write(tmp_path, "bin", {"a": column([[1, 2, 3]], "int32")})
    meta = tmp_path / "shard_0000/meta.json"
    meta.with_name(name).write_bytes(meta.read_bytes())
    assert len(opened(tmp_path)) == 3


@pytest.mark.parametrize(("storage_format", "name"), [("h5", "data_0000"), ("jsonl", "data")])
def test_files_that_the_rich_meta_does_not_list_are_refused(tmp_path: Path, storage_format: str, name: str) -> None:
    write(tmp_path, storage_format, {"a": column([[1, 2, 3]], "int32")}, {"a": column([[4]], "int32")})
    file = tmp_path / f"shard_0000/{name}.{storage_format}"
    stray = file.with_name(f"{name}.bak.{storage_format}")
    stray.write_bytes(file.read_bytes())
    for path in (tmp_path, stray):
        with pytest.raises(DataError, match=rf"{stray} is not listed in meta.json beside it: move it elsewhere"):
            opened(path)
    assert len(opened(file.rename(stray.replace(tmp_path / stray.name)))) == 3  # without a meta any name is read
    with pytest.raises(DataError, match=rf"shard_0000/{file.name} is missing, and its meta.json lists it"):
        opened(tmp_path)


def test_a_cut_hdf5_file_and_one_of_another_length_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "h5", {"a": column([[1, 2, 3]], "int32")})
    spoil_meta(tmp_path, shape=[4], offsets=[0, 4])
    with pytest.raises(DataError, match=r"3 elements of int32; its meta.json says 4 of int32"):
        opened(tmp_path)
    file = tmp_path / "shard_0000/data_0000.h5"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="not a complete HDF5 file"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"a": [1, 2]', r"data.jsonl line 2: Expecting"),
        ('{"a": [1], "b": [2]}', "line 2: keys a, b; expected a"),
        ('{"a": 1}', "line 2: key 'a': expected a list of numbers"),
        ('{"a": ["x"]}', "line 2: key 'a': expected numbers"),
        ('{"a": [1, 9223372036854775808]}', "line 2: key 'a': expected numbers of at most 64 bits"),
        ("[1]", "line 2: expected an object"),
        ('{"a": [[1]]}', "line 2: key 'a': expected numbers"),
        ("", "does not match its meta.json, it may be truncated"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, says: str) -> None:
    write(tmp_path, "jsonl", {"a": column([[1], [2]], "int32")})
    (tmp_path / "shard_0000/data.jsonl").write_text(f'{{"a": [1]}}\n{line}\n')
    with pytest.raises(DataError, match=says):
        opened(tmp_path)


@pytest.mark.parametrize("order", [*itertools.permutations(["[true]", "[1, 0]", "[0.5, 9007199254740993]", "[]"], 2)])
def test_lines_in_several_files_load_like_those_in_one(tmp_path: Path, order: tuple[str, ...]) -> None:
    lines = [f'{{"a": {numbers}}}\n' for numbers in order]
    (tmp_path / "several").mkdir()
    for number, line in enumerate(lines):
        (tmp_path / f"several/{number}.jsonl").write_text(line)
    (tmp_path / "one.jsonl").write_text("".join(lines))
    one, several = opened(tmp_path / "one.jsonl"), opened(tmp_path / "several")
    assert several.stream("a").dtype == one.stream("a").dtype
    assert (several.num_records, len(several)) == (one.num_records, len(one))
    for record in range(2):
        assert torch.equal(several.fetch_record(record, ["a"])["a"], one.fetch_record(record, ["a"])["a"])


def test_numbers_that_do_not_fit_the_dtype_of_the_meta_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", {"a": column([[1], [2]], "int8")})
    (tmp_path / "shard_0000/data.jsonl").write_text('{"a": [1]}\n{"a": [200]}\n')
    with pytest.raises(DataError, match="int8 can't represent"):
        opened(tmp_path)


def test_shards_must_agree(tmp_path: Path) -> None:
    one, other = {"a": column([[1]], "int32")}, {"b": column([[1]], "int32")}
    with pytest.raises(DataError, match=r"shard_0001 has the keys b, .*shard_0000 has a"):
        opened(write(tmp_path / "keys", "bin", one, other))
    with pytest.raises(DataError, match=r"key 'a' holds int64, .* holds int32"):
        opened(write(tmp_path / "types", "bin", one, {"a": column([[1]], "int64")}))
    with pytest.raises(DataError, match="different numbers of records"):
        write(tmp_path / "records", "bin", {**one, "b": column([[1], [2]], "int32")})
    with pytest.raises(DataError, match="can't be the name of a file"):
        write(tmp_path / "names", "bin", {"../a": column([[1]], "int32")})


def test_detection(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        detect_format(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="No supported data files"):
        detect_format(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.bin").touch()
    with pytest.raises(FileNotFoundError):
        detect_format(tmp_path)
    (tmp_path / "x.jsonl").touch()
    assert detect_format(tmp_path) == "jsonl"
    (tmp_path / "meta.json").touch()
    assert detect_format(tmp_path) == "bin"
    (tmp_path / ".draft").mkdir()
    (tmp_path / ".draft/half.h5").touch()
    assert detect_format(tmp_path) == "bin"
    (tmp_path / "deep/y.hdf5").touch()
    assert detect_format(tmp_path) == "h5"
    for name, found in (("y.hdf5", "h5"), ("y.h5", "h5"), ("y.jsonl", "jsonl")):
        (tmp_path / name).touch()
        assert detect_format(tmp_path / name) == found
    with pytest.raises(ValueError, match="Unsupported file format"):
        detect_format(tmp_path / "deep/a.bin")


@pytest.mark.parametrize("storage_format", FORMATS)
def test_folders_are_read_through_links(tmp_path: Path, storage_format: str) -> None:
    whole = write(tmp_path / "store", storage_format, *({"a": column([[number]], "int32")} for number in range(3)))
    (tmp_path / "disk").mkdir()
    (whole / "shard_0001").rename(tmp_path / "disk/shard_0001")
    (whole / "shard_0001").symlink_to(tmp_path / "disk/shard_0001")
    (whole / "a_second_link").symlink_to(whole / "shard_0002")
    (whole / "shard_0000/up").symlink_to(whole)
    (tmp_path / "disk/shard_0001/further_up").symlink_to(tmp_path)
    assert opened(whole).fetch(0, 3, "a").tolist() == [0, 1, 2]
    (tmp_path / "linked").symlink_to(whole)
    assert opened(tmp_path / "linked").fetch(0, 3, "a").tolist() == [0, 1, 2]


def test_shards_beyond_9999_stay_in_order(tmp_path: Path) -> None:
    for number in (10000, 9999):
        write_shard(tmp_path / f"shard_{number:04d}", {"a": column([[number]], "int32")}, "bin", number=0, tokens=1)
    assert opened(tmp_path).fetch(0, 2, "a").tolist() == [9999, 10000]


def test_formats_of_ones_own() -> None:
    with pytest.raises(ValueError, match="Unknown component 'zip'"):
        StoreFactory.create("zip")
    with pytest.raises(TypeError, match="not a TokenStore"):
        StoreFactory.register("zip")(dict)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="taken by MmapStore"):
        StoreFactory.register("bin")(MmapStore)
