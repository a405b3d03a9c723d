"""Seeded pages as a source: the rows of next_pages, resumed at a row, refused for another dataset."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tplr.data import CheckpointableDataset
from tplr.errors import DataError, StateError
from tplr.pages.manifest import parse_manifest
from tplr.pages.page_draw import next_pages
from tplr.streams.testing import check_resume

ROWS = {name: [f"{name} row {i}" for i in range(count)] for name, count in (("first", 60), ("second", 25))}


def objects(folder: str, rows: dict[str, list[str]]) -> dict[str, bytes]:
    out, sizes = {}, {}
    for name, texts in rows.items():
        pq.write_table(pa.table({"text": texts}), sink := io.BytesIO(), row_group_size=20, write_page_checksum=True)
        out[f"{folder}/{name}/0.parquet"] = sink.getvalue()
        shard = {"path": f"corpus/{folder}/{name}/0.parquet", "num_rows": len(texts), "byte_size": len(sink.getvalue())}
        sizes[name] = {"split": "train", "total_rows": len(texts), "shards": [shard]}
    metadata = "configs:\n- config_name: second\n- config_name: first\naddress: exact\n"
    return {
        **out,
        f"{folder}/_metadata.yaml": metadata.encode(),
        f"{folder}/_shard_sizes.json": json.dumps(sizes).encode(),
    }


@pytest.fixture
def pages(remote, monkeypatch):
    for name, value in {
        "TPLR_S3_ENDPOINT": remote.server.endpoint,
        "TPLR_DATASET_SUBFOLDER": "pages",
        "R2_DATASET_ACCOUNT_ID": "d" * 32,
        "R2_DATASET_BUCKET_NAME": "corpus",
        "R2_DATASET_READ_ACCESS_KEY_ID": "a" * 32,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": "c" * 64,
    }.items():
        monkeypatch.setenv(name, value)
    files = objects("pages", ROWS)
    remote.put(files)
    return parse_manifest(files["pages/_metadata.yaml"], files["pages/_shard_sizes.json"], "pages")


def test_rows_of_the_pages_that_are_drawn(pages, remote):
    dataset = CheckpointableDataset.from_pages(seed=7, n_pages=6, offset=12, rows_per_page=10)
    drawn = next_pages(pages.configs.values(), offset=12, n_pages=6, seed=7, rows_per_page=10)
    expected = [
        {"text": ROWS[page.config][page.row + i], "page": f"{page.config}_{page.row}_train"}
        for page in drawn
        for i in range(10)
    ]
    assert check_resume(dataset, places=[25, 60]) == expected
    with dataset.iter() as rows:
        next(rows)
        state = rows.state_dict()
    remote.put(objects("pages", {**ROWS, "second": ROWS["second"] + ["one more"]}))
    with dataset.iter(state_dict=state) as rows, pytest.raises(StateError, match="the bucket's is"):
        next(rows)
    with CheckpointableDataset.from_pages(7, 1, rows_per_page=50).iter() as rows, pytest.raises(DataError):
        next(rows)
    with pytest.raises(ValueError, match="arguments out of range"):
        CheckpointableDataset.from_pages(7, -1)
