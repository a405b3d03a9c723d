"""Valid and invalid manifests."""

import hashlib
import json

import pytest

from tplr.errors import DataError
from tplr.pages.manifest import ParquetShard, parse_manifest

METADATA = b"configs: [{config_name: default}, {config_name: b}, {config_name: a}, {config_name: lost}]"


def sizes(**changes: object) -> dict:
    shards = [{"path": "bucket/sub/a/1.parquet", "num_rows": 5}, {"path": "bucket/sub/a/0.parquet", "num_rows": 7}]
    entry = {"split": "train", "total_rows": 12, "shards": shards} | changes
    return {"default": entry, "a": entry, "b": {"total_rows": 0, "shards": []}, "unlisted": entry}


def parse(value: object, metadata: bytes = METADATA):
    return parse_manifest(metadata, json.dumps(value).encode(), "sub")


def test_documented_manifests_are_understood():
    manifest = parse(sizes())
    assert list(manifest.configs) == ["b", "a"]
    assert manifest.address == "group-average"
    config = manifest.configs["a"]
    assert config.shards == (ParquetShard("a/1.parquet", 5), ParquetShard("a/0.parquet", 7))
    assert (config.num_rows, config.split, manifest.configs["b"].split) == (12, "train", "train")


def test_our_additions_are_understood():
    shard = {"path": "a/x.parquet", "num_rows": 12, "byte_size": 99, "sha256": "0" * 64, "file_hash": "ignored"}
    manifest = parse(sizes(shards=[shard]), METADATA + b"\naddress: exact")
    assert manifest.address == "exact"
    assert manifest.configs["a"].shards == (ParquetShard("a/x.parquet", 12, 99, "0" * 64),)


def test_digest_covers_both_objects():
    text = json.dumps(sizes()).encode()
    joined = hashlib.sha256(METADATA).digest() + hashlib.sha256(text).digest()
    assert parse(sizes()).sha256 == hashlib.sha256(joined).hexdigest()
    assert parse(sizes()).sha256 != parse(sizes(), METADATA + b"\n").sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_rows": 13}, "total_rows is 13, but the shards add up to 12"),
        ({"total_rows": "12"}, "total_rows"),
        ({"shards": [{"path": "sub/x", "num_rows": 6}] * 2}, "listed twice"),
        ({"shards": [{"path": "sub/x", "num_rows": -1}]}, "num_rows"),
        ({"shards": [{"path": "sub/x", "num_rows": None}]}, "num_rows"),
        ({"shards": [{"path": "sub/x", "num_rows": True}]}, "num_rows"),
        ({"shards": [{"num_rows": 12}]}, "path"),
        ({"shards": [{"path": "sub/../../etc", "num_rows": 12}]}, "not a path inside sub/"),
        ({"shards": [{"path": "/etc/passwd", "num_rows": 12}]}, "not a path inside sub/"),
        ({"shards": [{"path": "sub/x", "num_rows": 12, "sha256": "abc"}]}, "sha256"),
        ({"shards": None}, "shards"),
    ],
)
def test_a_contradictory_config_is_refused(changes, message):
    with pytest.raises(DataError, match=message) as caught:
        parse(sizes(**changes))
    assert "_shard_sizes.json: a" in str(caught.value) or "not a path" in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "shard_sizes", "message"),
    [
        (METADATA, b'{"a": {"spl', "_shard_sizes.json is not JSON"),
        (METADATA, b"[" * 100_000, "_shard_sizes.json is not JSON"),
        (METADATA, b"[]", "expected an object of configs, got list"),
        (b"configs: [", b"{}", "_metadata.yaml is not YAML"),
        (b"\xff\xfe\x00", b"{}", "_metadata.yaml is not YAML"),
        (b"", b"{}", "_metadata.yaml"),
        (b"configs: [{name: a}]", b"{}", "config_name"),
        (METADATA + b"\naddress: guess", b"{}", "address"),
        (b"!!python/object/apply:os.system ['true']", b"{}", "_metadata.yaml is not YAML"),
    ],
)
def test_broken_files_are_refused(metadata, shard_sizes, message):
    with pytest.raises(DataError, match=message):
        parse_manifest(metadata, shard_sizes, "sub")
