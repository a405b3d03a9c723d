"""HDF5 stores: of this library and of other programs, damaged, and hostile."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from small_stores import column, opened, spoil_meta, write

from tplr.errors import ConfigError, DataError
from tplr.stores.factory import StoreFactory
from tplr.stores.h5 import H5Store


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


def test_a_cut_hdf5_file_and_one_of_another_length_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "h5", {"a": column([[1, 2, 3]], "int32")})
    spoil_meta(tmp_path, shape=[4], offsets=[0, 4])
    with pytest.raises(DataError, match=r"3 elements of int32; its meta.json says 4 of int32"):
        opened(tmp_path)
    file = tmp_path / "shard_0000/data_0000.h5"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="not a complete HDF5 file"):
        opened(tmp_path)
