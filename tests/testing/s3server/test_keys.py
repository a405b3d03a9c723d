"""Rights of each key, and the time at which a changed table takes effect."""

import json
from pathlib import Path
from typing import Any

import pytest

from tplr.errors import ConfigError
from tplr.testing.s3server import Server
from tplr.testing.s3server.keys import KeyTable, parse_keys

OWNER, READER, WRITER = "1" * 32, "2" * 32, "3" * 32
DENIED = (403, "AccessDenied")


async def test_a_read_key_reads_and_lists(server: Server, s3: Any, connect: Any, refusal: Any) -> None:
    reader = await connect(server, READER)
    await s3.put_object(Bucket="gradients", Key="a", Body=b"x")
    await reader.get_object(Bucket="gradients", Key="a")
    await reader.head_object(Bucket="gradients", Key="a")
    await reader.head_bucket(Bucket="gradients")
    assert (await reader.list_objects_v2(Bucket="gradients"))["KeyCount"] == 1
    # R2's read tokens can list, so that a missing key is a true 404.
    assert await refusal(reader.get_object(Bucket="gradients", Key="none")) == (404, "NoSuchKey")
    for call in (
        reader.put_object(Bucket="gradients", Key="a", Body=b"y"),
        reader.delete_object(Bucket="gradients", Key="a"),
        reader.delete_objects(Bucket="gradients", Delete={"Objects": [{"Key": "a"}]}),
        reader.create_multipart_upload(Bucket="gradients", Key="a"),
        reader.list_multipart_uploads(Bucket="gradients"),
    ):
        assert await refusal(call) == DENIED


async def test_a_write_key_writes_only(server: Server, connect: Any, refusal: Any) -> None:
    writer = await connect(server, WRITER)
    await writer.put_object(Bucket="gradients", Key="a", Body=b"x")
    for call in (writer.get_object(Bucket="gradients", Key="a"), writer.list_objects_v2(Bucket="gradients")):
        assert await refusal(call) == DENIED
    await writer.delete_object(Bucket="gradients", Key="a")


async def test_rights_end_at_the_bucket(server: Server, connect: Any, refusal: Any) -> None:
    reader = await connect(server, READER)
    assert await refusal(reader.get_object(Bucket="checkpoints", Key="a")) == DENIED
    assert await refusal(reader.head_bucket(Bucket="checkpoints")) == (403, "403")


async def test_buckets_are_an_accounts_business(s3: Any, refusal: Any) -> None:
    assert await refusal(s3.list_buckets()) == DENIED
    assert await refusal(s3.create_bucket(Bucket="another")) == DENIED
    assert await refusal(s3.delete_bucket(Bucket="gradients")) == DENIED


async def test_a_key_that_is_revoked_while_in_use(server: Server, s3: Any, keys: Any, refusal: Any) -> None:
    await s3.put_object(Bucket="gradients", Key="a", Body=b"x")
    keys[OWNER]["buckets"]["gradients"] = "read"
    server.keys.replace(keys)
    assert await refusal(s3.put_object(Bucket="gradients", Key="a", Body=b"x")) == DENIED
    del keys[OWNER]
    server.keys.replace(keys)
    assert await refusal(s3.get_object(Bucket="gradients", Key="a")) == (401, "Unauthorized")


async def test_a_bucket_that_a_new_table_names_exists(server: Server, s3: Any, keys: Any, refusal: Any) -> None:
    assert await refusal(s3.list_objects_v2(Bucket="dataset")) == (404, "NoSuchBucket")
    keys[OWNER]["buckets"]["dataset"] = "read-write"
    server.keys.replace(keys)
    assert (await s3.list_objects_v2(Bucket="dataset"))["KeyCount"] == 0


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({OWNER: keys[OWNER]}))
    table = KeyTable(path)
    assert table.find(READER) is None
    path.write_text(json.dumps(keys))
    reader = table.find(READER)
    assert reader is not None
    assert reader.may("read", "gradients")
    assert not reader.may("write", "gradients")
    assert not reader.may("read", "checkpoints")
    for broken in ("{", json.dumps({OWNER: {}})):
        path.write_text(broken)
        assert table.find(READER) is reader
        assert "its last valid content stays" in caplog.text
        caplog.clear()
    path.unlink()
    assert table.find(READER) is reader


def test_changes_wait_for_the_delay(keys: Any) -> None:
    now = 0.0
    table = KeyTable(keys, delay=60, clock=lambda: now)
    assert table.find(OWNER)
    table.replace({})
    now = 30
    table.replace({READER: keys[READER]})
    now = 59.9
    assert table.find(OWNER)
    now = 60
    assert (table.find(OWNER), table.find(READER)) == (None, None)
    now = 90
    assert table.find(READER)


def test_all_that_is_wrong_with_a_table_is_said_at_once_and_no_secret_is() -> None:
    table = {
        "short": {"secret": "0" * 64, "buckets": {}},
        "1" * 32: {"secret": "sekret", "buckets": {"Bad_Name": "read", "good-name": "all"}},
        "2" * 32: {"secret": "0" * 64},
    }
    with pytest.raises(ConfigError) as caught:
        parse_keys(table)
    assert len(caught.value.problems) == 5
    assert "sekret" not in str(caught.value)
    assert "0" * 64 not in repr(parse_keys({"1" * 32: {"secret": "0" * 64, "buckets": {}}}))
