"""Snapshots are read back as written, in pieces of any size; torn, foreign or invalid ones are refused."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tplr.errors import StateError
from tplr.exchange import snapshot
from tplr.exchange.snapshot import (
    MANIFEST,
    Piece,
    ShardWriter,
    SnapshotManifest,
    SnapshotReader,
    TensorLayout,
    check_shards,
    parse_manifest,
    read_manifest,
    remove_snapshot,
    write_manifest,
)


def make_tensors():
    torch.manual_seed(0)
    return {
        "model.table": torch.randn(37, 5),
        "model.norm": torch.randn(11),
        "model.half": torch.randn(6, 4).bfloat16(),
        "step": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "model.transposed": torch.randn(4, 6).t(),
    }


def write(folder, tensors, **options):
    writer = ShardWriter(folder, **options)
    writer.write(tensors)
    manifest = make_manifest(writer.tensors, writer.shards)
    write_manifest(folder, manifest)
    return manifest


def make_manifest(tensors, shards):
    return SnapshotManifest(
        window=9,
        start_window=2,
        global_step=7,
        version="3",
        values={"a": [1, 2.5]},
        tensors=tensors,
        shards=tuple(shards),
    )


@pytest.mark.parametrize("max_bytes", [1, 64, 100, 2**20])
def test_what_is_read_is_what_was_written(tmp_path, max_bytes):
    tensors = make_tensors()
    write(tmp_path, tensors, max_bytes=max_bytes)
    manifest = read_manifest(tmp_path)
    assert manifest.covers(tensors) is None
    assert manifest.values == {"a": [1, 2.5]}
    check_shards(tmp_path, manifest, manifest.shards)
    reader = SnapshotReader(tmp_path, manifest)
    for name, tensor in tensors.items():
        target = torch.full_like(tensor, 99)
        reader.read_into(name, target)
        assert torch.equal(target, tensor), name
    # Any reader of safetensors can read a shard, and no shard exceeds the requested size by more than a row.
    for shard in manifest.shards:
        pieces = load_file(tmp_path / shard.name)
        assert pieces
        assert sum(piece.nbytes for piece in pieces.values()) <= max(max_bytes, 20)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 36), max_size=4, unique=True), readers=st.integers(1, 6))
def test_saved_by_some_and_loaded_by_others(tmp_path_factory, cuts, readers):
    folder = tmp_path_factory.mktemp("snapshot")
    table = torch.arange(37 * 3, dtype=torch.float32).view(37, 3)
    edges = [0, *sorted(cuts), 37]
    shards = []
    for rank, (start, stop) in enumerate(itertools.pairwise(edges)):
        writer = ShardWriter(folder, rank=rank, max_bytes=50)
        writer.write({"table": table[start:stop]}, {"table": start})
        shards += writer.shards
    manifest = make_manifest({"table": TensorLayout.of(table)}, shards)
    write_manifest(folder, manifest)
    assert manifest.covers(["table"]) is None
    check_shards(folder, manifest, manifest.shards)
    share = -(-37 // readers)
    for rank in range(readers):
        rows = table[rank * share : (rank + 1) * share]
        target = torch.zeros_like(rows)
        SnapshotReader(folder, manifest).read_into("table", target, first_row=rank * share)
        assert torch.equal(target, rows)


def test_one_changed_byte_is_found(tmp_path):
    manifest = write(tmp_path, make_tensors(), max_bytes=100)
    for shard in manifest.shards:
        path = tmp_path / shard.name
        right = path.read_bytes()
        for position in (0, 8, len(right) // 2, len(right) - 1):
            wrong = bytearray(right)
            wrong[position] ^= 1
            path.write_bytes(wrong)
            with pytest.raises(StateError, match=shard.name):
                check_shards(tmp_path, manifest, [shard])
        path.write_bytes(right[:-1])
        with pytest.raises(StateError, match="checksum"):
            check_shards(tmp_path, manifest, [shard])
        path.write_bytes(right)
    path.unlink()
    with pytest.raises(StateError, match="No such file"):
        check_shards(tmp_path, manifest, [shard])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"format": 2},
        lambda m: m | {"window": -1},
        lambda m: m | {"more": 1},
        lambda m: {key: value for key, value in m.items() if key != "version"},
        lambda m: m | {"tensors": {"t": {"dtype": "F64", "shape": [1]}}},
        lambda m: m | {"tensors": {"t": {"dtype": "F32", "shape": [-1]}}},
        lambda m: m | {"shards": [{**m["shards"][0], "name": "../../etc/passwd"}]},
        *(
            change
            for kind in ("blake3s", "sha256s")
            for change in (
                lambda m, kind=kind: m | {"shards": [{**m["shards"][0], kind: ["0"]}]},
                lambda m, kind=kind: m | {"shards": [{**m["shards"][0], kind: []}]},
                lambda m, kind=kind: m | {"shards": [{**m["shards"][0], kind: 2 * m["shards"][0][kind]}]},
            )
        ),
    ],
)
def test_a_senseless_manifest_is_refused(tmp_path, change):
    write(tmp_path, make_tensors())
    path = tmp_path / MANIFEST
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(StateError, match="manifest"):
        read_manifest(tmp_path)


def test_every_changed_bit_of_a_manifest_is_found(tmp_path):
    write(tmp_path, {"t": torch.ones(3)})
    whole = (tmp_path / MANIFEST).read_bytes()
    for position in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(StateError, match="a manifest"):
            parse_manifest(bytes(changed), "a manifest")


def test_pieces_that_leave_a_gap_or_overlap_are_refused(tmp_path):
    manifest = write(tmp_path, {"t": torch.randn(10, 2)}, max_bytes=32)
    shards = manifest.shards
    assert "have a gap or overlap at row 4" in make_manifest(manifest.tensors, [shards[0], shards[2]]).covers(["t"])
    assert "have a gap or overlap" in make_manifest(manifest.tensors, [*shards, shards[1]]).covers(["t"])
    assert "8 rows" in make_manifest(manifest.tensors, shards[:2]).covers(["t"])
    assert "a piece of an unknown tensor" in make_manifest({}, shards).covers([])
    strange = shards[0].model_copy(update={"pieces": [Piece(tensor="t\n\x1b[31m", start=0, rows=4)]})
    assert make_manifest(manifest.tensors, [strange]).covers(["t"]).isprintable()


def test_a_tensor_in_one_piece_for_each_row_is_read_in_linear_time(tmp_path, monkeypatch):
    rows = 2000
    tensor = torch.randn(rows, 1)
    writer = ShardWriter(tmp_path)
    writer.tensors["t"] = TensorLayout.of(tensor)
    order = torch.randperm(rows).tolist()
    writer._write_shard([(Piece(tensor="t", start=row, rows=1), tensor[row : row + 1]) for row in order])
    reader = SnapshotReader(tmp_path, make_manifest(writer.tensors, writer.shards))
    visits = 0
    stop = snapshot._PiecePlace.stop.fget

    def counted(place):
        nonlocal visits
        visits += 1
        return stop(place)

    monkeypatch.setattr(snapshot._PiecePlace, "stop", property(counted))
    reader.check_finite()
    assert visits < 10 * rows
    visits = 0
    for row in range(0, rows, 100):
        target = torch.empty(2, 1)
        reader.read_into("t", target, first_row=row)
        assert torch.equal(target, tensor[row : row + 2])
    assert visits < 20 * 50


def test_an_empty_tensor_of_huge_rows_is_no_layout():
    with pytest.raises(ValueError, match="a tensor of shape"):
        TensorLayout(dtype="F32", shape=(0, 2**52, 2**52))


def test_a_wrong_target_is_refused(tmp_path):
    reader = SnapshotReader(tmp_path, write(tmp_path, {"t": torch.randn(10, 2)}))
    for target in (torch.zeros(10, 3), torch.zeros(11, 2), torch.zeros(10, 2).bfloat16()):
        with pytest.raises(StateError, match="t "):
            reader.read_into("t", target)
    with pytest.raises(StateError):
        reader.read_into("other", torch.zeros(10, 2))
    with pytest.raises(StateError, match="float64"):
        ShardWriter(tmp_path).write({"t": torch.zeros(2, dtype=torch.float64)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.table", "model.half"])
def test_one_entry_that_is_no_finite_number_is_found(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(snapshot, "COPY_BYTES", 24)  # several reads for each tensor
    tensors = make_tensors()
    SnapshotReader(tmp_path, write(tmp_path, tensors, max_bytes=100)).check_finite()
    tensors[name][-1, -1] = value
    with pytest.raises(StateError, match=f"{name} has entries that are not finite"):
        SnapshotReader(tmp_path, write(tmp_path, tensors, max_bytes=100)).check_finite()


def test_a_removed_snapshot_is_none_at_any_moment(tmp_path):
    folder = tmp_path / "one"
    write(folder, make_tensors())
    remove_snapshot(folder)
    assert not folder.exists()
    remove_snapshot(folder)
    with pytest.raises(FileNotFoundError):
        read_manifest(folder)
