"""Datasets are written completely or not at all, and the same rows give the same bytes."""

import hashlib
import json
import subprocess
import sys
import tracemalloc

import pyarrow.parquet as pq
import pytest

from tplr.errors import ConfigError, StateError
from tplr.pages.build import write_dataset
from tplr.pages.manifest import parse_manifest

ROWS = [f"row {i} Größe 漢字" for i in range(333)]


def build(folder, rows=ROWS, **settings):
    with write_dataset(folder, **{"rows_per_group": 25, "rows_per_shard": 100, **settings}) as writer:
        assert writer.add("b.one", iter(rows)) == len(rows)
        writer.add("a-two", rows[:110])
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_manifest_says_what_the_files_are(tmp_path):
    files = build(tmp_path / "deep" / "set")
    assert set(files) == {
        *("_metadata.yaml", "_shard_sizes.json", "a-two/train-00000.parquet", "a-two/train-00001.parquet"),
        *(f"b.one/train-{i:05d}.parquet" for i in range(4)),
    }
    manifest = parse_manifest(files["_metadata.yaml"], files["_shard_sizes.json"], "set")
    assert manifest.address == "exact"
    assert [(config.name, config.num_rows) for config in manifest.configs.values()] == [("b.one", 333), ("a-two", 110)]
    texts = []
    for shard in manifest.configs["b.one"].shards:
        data = files[shard.path]
        assert (shard.byte_size, shard.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        file = pq.ParquetFile(tmp_path / "deep" / "set" / shard.path)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        assert shard.row_group_size == 25
        assert shard.disagreement(sizes) is None
        assert sizes == ([25] * 4 if shard.num_rows == 100 else [25, 8])
        texts += file.read(columns=["text"]).column(0).to_pylist()
    assert texts == ROWS
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["set"]  # nothing else is left


def test_the_same_rows_give_the_same_bytes(tmp_path):
    assert build(tmp_path / "one") == build(tmp_path / "two")
    other = build(tmp_path / "three", address="group-average")
    assert b"address: group-average" in other["_metadata.yaml"]


def test_a_shard_is_full_to_the_row(tmp_path):
    build(tmp_path / "set", rows=ROWS[:200])
    sizes = json.loads((tmp_path / "set/_shard_sizes.json").read_text())
    assert [shard["num_rows"] for shard in sizes["b.one"]["shards"]] == [100, 100]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda writer: writer.add("few", ROWS[:101]), "'few' has 101 rows; pages need at least 102"),
        (lambda writer: writer.add("default", ROWS), "'default'"),
        (lambda writer: writer.add("../up", ROWS), "'../up': expected letters"),
        (lambda writer: [writer.add("twice", ROWS) for _ in range(2)], "'twice' is there already"),
        (lambda writer: None, "at least one config"),
    ],
)
def test_what_no_dataset_can_be_leaves_nothing(tmp_path, add, message):
    with pytest.raises(ConfigError, match=message), write_dataset(tmp_path / "set") as writer:
        add(writer)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("group", "shard"), [(0, 0), (25, 30), (-1, 10), (100, 50)])
def test_sizes_that_do_not_go_together(tmp_path, group, shard):
    with pytest.raises(ConfigError, match="expected a multiple"):
        build(tmp_path / "set", rows_per_group=group, rows_per_shard=shard)


def test_what_exists_is_never_touched(tmp_path):
    before = build(tmp_path / "set")
    with pytest.raises(ConfigError, match="exists"):
        build(tmp_path / "set", rows=ROWS[:150])
    assert {name: (tmp_path / "set" / name).read_bytes() for name in before} == before


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="can't write"):
        build(tmp_path / "file" / "set")


def test_a_process_that_is_killed_leaves_no_dataset(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from tplr.pages.build import write_dataset
def rows():
    for i in range(330):
        yield f"row {{i}}"
    os.kill(os.getpid(), signal.SIGKILL)
with write_dataset(Path({str(tmp_path / "set")!r}), rows_per_group=10, rows_per_shard=100) as writer:
    writer.add("a", rows())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    [left] = tmp_path.iterdir()
    assert (left.name[0], left.suffix) == (".", ".draft")
    assert len([*left.rglob("*.parquet")]) == 3
    assert not [*left.rglob("_*")]
    build(tmp_path / "set")  # a new build is not blocked


def test_a_row_group_is_in_memory_and_not_the_text(tmp_path):
    rows = (f"{i:08d}" * 200 for i in range(12_000))  # 19 MB
    tracemalloc.start()
    with write_dataset(tmp_path / "set", rows_per_group=100, rows_per_shard=4000) as writer:
        writer.add("a", rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e6
