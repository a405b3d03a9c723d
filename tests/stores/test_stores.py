"""All kinds of store against plain lists: every range, every record, every mismatch of files and meta."""

import itertools
import json
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import column, opened, spoil_meta, write

from tplr.errors import DataError
from tplr.stores.detect import detect_format
from tplr.stores.factory import StoreFactory
from tplr.stores.mmap import MmapStore
from tplr.stores.writer import describe, write_shard

FORMATS = ("bin", "h5", "jsonl")


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
