"""The output of a preparation is opened only if it is finished and complete."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from tplr.errors import DataError
from tplr.stores.datasets import DatasetFactory
from tplr.stores.detect import JOURNAL, REPORT
from tplr.stores.factory import StoreFactory
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.pipeline import prepare

FORMATS = ("bin", "h5", "jsonl")


@pytest.fixture(params=FORMATS)
def out(request: pytest.FixtureRequest, tokenizer_path: Path, tmp_path: Path) -> Path:
    """Two domains of several shards each."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"record {i}", "site": "ab"[i % 2]}) + "\n" for i in range(40)))
    config = PipelineConfig.from_dict({
        "input": {"sections": [{"field": "text"}]},
        "preprocessing": {"min_chars": 1},
        "output": {"domain_key": "site", "max_tokens_per_shard": 100, "storage_format": request.param},
    })  # fmt: skip
    return prepare([source], tmp_path / "out", config, tokenizer_path).folder


def refused(path: Path, says: str) -> None:
    with pytest.raises(DataError, match=says):
        DatasetFactory.load("seq", path, 4)


def test_whole_ones_are_opened_at_every_level(out: Path) -> None:
    whole, one, shard = (len(DatasetFactory.load("seq", path, 4)) for path in (out, out / "a", out / "a/shard_0001"))
    assert whole > one > shard > 0


def test_unfinished_ones_are_refused_at_every_level(out: Path) -> None:
    # As after kill -9: the journal in place of the report, and fewer shards.
    (out / REPORT).rename(out / JOURNAL)
    shutil.rmtree(out / "b")
    for path in (out, out / "a", out / "a/shard_0001"):
        refused(path, r"out is not finished: repeat the tplr data prepare command .* allow_incomplete=True")
    assert len(DatasetFactory.load("seq", out, 4, allow_incomplete=True)) > 0
    shutil.rmtree(out / "a")
    refused(out, "out is not finished")  # no shard yet


def test_a_missing_shard(out: Path) -> None:
    shutil.rmtree(out / "a/shard_0001")
    refused(out, r"out is incomplete: a/shard_0001/meta.json is missing; remove the folder and prepare it again")
    refused(out / "a", "a/shard_0001")
    assert len(DatasetFactory.load("seq", out / "b", 4)) > 0
    assert len(DatasetFactory.load("seq", out, 4, allow_incomplete=True)) > 0


def test_a_shard_of_another_preparation(out: Path) -> None:
    meta = out / "a/shard_0001/meta.json"
    meta.write_bytes(meta.read_bytes() + b" ")
    refused(out, "a/shard_0001/meta.json belongs to another preparation, or is damaged")


def test_a_shard_too_many(out: Path) -> None:
    shutil.copytree(out / "a/shard_0001", out / "a/shard_0009")
    refused(out, r"a/shard_0009 is not a shard of its prepare.json")


def test_shards_and_domains_behind_links(out: Path, tmp_path: Path) -> None:
    whole = len(DatasetFactory.load("seq", out, 4))
    for path, elsewhere in (("a/shard_0001", "disk_1"), ("b", "disk_2")):
        (out / path).rename(tmp_path / elsewhere)
        (out / path).symlink_to(tmp_path / elsewhere)
    assert len(DatasetFactory.load("seq", out, 4)) == whole


def test_a_shard_that_would_not_be_read(out: Path) -> None:
    (out / "a/shard_0001").rename(out / "a/.shard")
    (out / "a/shard_0001").symlink_to(out / "a/shard_0000")
    report = json.loads((out / REPORT).read_text())
    shards = report["progress"]["shards"]
    shards["a/shard_0001"] = shards["a/shard_0000"]
    (out / REPORT).write_text(json.dumps(report))
    refused(out, "a/shard_0001 would not be read, because it is hidden or a second link to a folder")


def test_a_damaged_report(out: Path) -> None:
    (out / REPORT).write_text('{"progress"')
    refused(out, "prepare.json is not a report of a preparation")
    assert len(DatasetFactory.load("seq", out / "a", 4)) > 0  # above a store, the file may be of another program


@pytest.mark.parametrize("out", ["bin"], indirect=True)
def test_workers_open_what_was_opened(out: Path) -> None:
    shutil.rmtree(out / "a/shard_0001")
    store = StoreFactory.create("bin")
    with pytest.raises(DataError, match="is incomplete"):
        store.load(out)
    store.load(out, allow_incomplete=True)
    assert len(pickle.loads(pickle.dumps(store))) == len(store)
