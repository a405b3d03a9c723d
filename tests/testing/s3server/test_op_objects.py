"""Operations on objects over HTTP, by an unmodified client."""

import asyncio
import base64
import gzip
import hashlib
import os
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tplr.testing.s3server import Rules, serve

BUCKET = "gradients"


async def put(s3: Any, key: str, body: bytes = b"x", **more: Any) -> str:
    return (await s3.put_object(Bucket=BUCKET, Key=key, Body=body, **more))["ETag"].strip('"')


async def get(s3: Any, key: str, **more: Any) -> bytes:
    return await (await s3.get_object(Bucket=BUCKET, Key=key, **more))["Body"].read()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_what_was_put_is_what_is_got(s3: Any) -> None:
    body = os.urandom(3 * 2**20 + 17)
    etag = await put(s3, "gradient-1-2.pt", body, Metadata={"Window": "7"}, ContentType="application/x-tensors")
    assert etag == hashlib.md5(body).hexdigest()
    answer = await s3.get_object(Bucket=BUCKET, Key="gradient-1-2.pt")
    assert await answer["Body"].read() == body
    head = await s3.head_object(Bucket=BUCKET, Key="gradient-1-2.pt")
    for said in (answer, head):
        assert said["ContentLength"] == len(body)
        assert said["ETag"] == f'"{etag}"'
        assert said["Metadata"] == {"window": "7"}
        assert said["ContentType"] == "application/x-tensors"
    await s3.delete_object(Bucket=BUCKET, Key="gradient-1-2.pt")
    await s3.delete_object(Bucket=BUCKET, Key="gradient-1-2.pt")  # deleting a missing object is not an error
    assert (await s3.list_objects_v2(Bucket=BUCKET))["KeyCount"] == 0


async def test_an_empty_object(s3: Any) -> None:
    await put(s3, "empty", b"")
    assert await get(s3, "empty") == b""


async def test_an_overwrite_replaces_bytes_and_headers(s3: Any) -> None:
    await put(s3, "a", b"first", Metadata={"n": "1"})
    await put(s3, "a", b"2nd")
    answer = await s3.get_object(Bucket=BUCKET, Key="a")
    assert (await answer["Body"].read(), answer["Metadata"]) == (b"2nd", {})


async def test_what_is_not_there(s3: Any, refusal: Any) -> None:
    assert await refusal(s3.get_object(Bucket=BUCKET, Key="none")) == (404, "NoSuchKey")
    assert await refusal(s3.head_object(Bucket=BUCKET, Key="none")) == (404, "404")  # HEAD has no error body
    assert await refusal(s3.get_object(Bucket="nowhere", Key="a")) == (404, "NoSuchBucket")
    assert await refusal(s3.head_bucket(Bucket="nowhere")) == (404, "404")
    await s3.head_bucket(Bucket=BUCKET)


HOSTILE_KEYS = [
    "../x",
    "../../../../etc/passwd",
    "a/../b",
    "./a",
    "/leading",
    "a//b",
    "a/b",
    "a",
    "a/",
    "a%2Fb",
    "a b+c&d=e?f#g",
    "ключ/鍵/🗝",
    "quotes\"'<>&",
    "control\x01\r\n\t",
    "s" * 1024,
    ".",
    "..",
    "~!*'()",
]


async def test_any_key_is_a_key(s3: Any, tmp_path: Path, refusal: Any) -> None:
    for key in HOSTILE_KEYS:
        await put(s3, key, key.encode())
    listed = (await s3.list_objects_v2(Bucket=BUCKET))["Contents"]
    assert [entry["Key"] for entry in listed] == sorted(HOSTILE_KEYS, key=str.encode)
    for key in HOSTILE_KEYS:
        assert await get(s3, key) == key.encode()
    assert names_in(tmp_path) == ["root"]
    assert names_in(tmp_path / "root") == ["buckets", "drafts", "lock"]
    for key in HOSTILE_KEYS:
        await s3.delete_object(Bucket=BUCKET, Key=key)
        assert await refusal(s3.get_object(Bucket=BUCKET, Key=key)) == (404, "NoSuchKey")


async def test_a_key_has_at_most_1024_bytes(s3: Any, refusal: Any) -> None:
    await put(s3, "é" * 512)
    assert await refusal(put(s3, "é" * 512 + "x")) == (400, "KeyTooLongError")


async def test_user_metadata_has_at_most_8_kib(s3: Any, refusal: Any) -> None:
    # In two headers: aiohttp's client accepts at most 8,190 bytes in one.
    largest = {"a": "v" * 4095, "b": "v" * 4095}
    await put(s3, "a", Metadata=largest)
    assert (await s3.head_object(Bucket=BUCKET, Key="a"))["Metadata"] == largest
    assert await refusal(put(s3, "b", Metadata={**largest, "c": ""})) == (400, "MetadataTooLarge")


async def test_a_put_has_at_most_5_gib(tmp_path: Path, keys: Any, connect: Any, refusal: Any) -> None:
    assert Rules().max_put_bytes == 5 * 2**30 - 5 * 2**20
    async with serve(tmp_path / "small", keys, rules=Rules(max_put_bytes=10)) as small:
        client = await connect(small)
        await put(client, "a", b"0123456789")
        assert await refusal(put(client, "b", b"0123456789a")) == (400, "EntityTooLarge")


async def test_an_encoded_body_is_stored_as_it_came(s3: Any) -> None:
    body = gzip.compress(b"text" * 100)
    await put(s3, "a", body, ContentEncoding="gzip")
    assert (await s3.head_object(Bucket=BUCKET, Key="a"))["ContentLength"] == len(body)


async def test_ranges(s3: Any, refusal: Any) -> None:
    body = bytes(range(100))
    await put(s3, "a", body)
    for header, expected, content_range in [
        ("bytes=0-9", body[:10], "bytes 0-9/100"),
        ("bytes=90-", body[90:], "bytes 90-99/100"),
        ("bytes=95-1000", body[95:], "bytes 95-99/100"),
        ("bytes=-5", body[-5:], "bytes 95-99/100"),
    ]:
        answer = await s3.get_object(Bucket=BUCKET, Key="a", Range=header)
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert answer["ContentRange"] == content_range
        assert await answer["Body"].read() == expected
    assert await refusal(s3.get_object(Bucket=BUCKET, Key="a", Range="bytes=100-")) == (416, "InvalidRange")


async def test_conditions_of_a_get(s3: Any, refusal: Any) -> None:
    etag = await put(s3, "a", b"one")
    assert await get(s3, "a", IfMatch=etag, Range="bytes=1-1") == b"n"
    assert await get(s3, "a", IfNoneMatch='"other"') == b"one"
    assert await refusal(get(s3, "a", IfMatch="other")) == (412, "PreconditionFailed")
    assert await refusal(get(s3, "a", IfNoneMatch=etag)) == (304, "304")
    await put(s3, "a", b"two")
    assert await refusal(get(s3, "a", IfMatch=etag)) == (412, "PreconditionFailed")


async def test_conditions_of_a_put(s3: Any, refusal: Any) -> None:
    assert await refusal(put(s3, "a", IfMatch="other")) == (412, "PreconditionFailed")
    etag = await put(s3, "a", b"one", IfNoneMatch="*")
    assert await refusal(put(s3, "a", b"two", IfNoneMatch="*")) == (412, "PreconditionFailed")
    assert await refusal(put(s3, "a", b"two", IfMatch="other")) == (412, "PreconditionFailed")
    assert await get(s3, "a") == b"one"
    await put(s3, "a", b"two", IfMatch=etag)
    assert await get(s3, "a") == b"two"


async def test_times_as_conditions(tmp_path: Path, keys: Any, connect: Any, refusal: Any) -> None:
    """Also for a PUT, as in R2. They count in whole seconds, and only without the corresponding ETag condition."""
    now = 1_700_000_000.9
    rules = Rules(one_write_per_second=False, max_clock_skew=1e10)
    async with serve(tmp_path, keys, rules=rules, clock=lambda: now) as server:
        s3 = await connect(server)

        async def put_if(header: str, moment: int, **more: Any) -> Any:
            def add(params: Any, **_: Any) -> None:
                params["headers"][header] = formatdate(moment, usegmt=True)

            s3.meta.events.register("before-call.s3.PutObject", add)
            try:
                return await put(s3, "a", b"new", **more)
            finally:
                s3.meta.events.unregister("before-call.s3.PutObject", add)

        etag = await put_if("If-Unmodified-Since", 0)
        stamp, before = int(now), int(now) - 1
        failed = (412, "PreconditionFailed")
        assert await refusal(get(s3, "a", IfModifiedSince=stamp)) == (304, "304")
        assert await get(s3, "a", IfModifiedSince=before) == b"new"
        assert await get(s3, "a", IfUnmodifiedSince=stamp) == b"new"
        assert await refusal(get(s3, "a", IfUnmodifiedSince=before)) == failed
        assert await get(s3, "a", IfUnmodifiedSince=before, IfMatch=etag) == b"new"
        assert await get(s3, "a", IfModifiedSince=stamp, IfNoneMatch="other") == b"new"
        assert await refusal(put_if("If-Unmodified-Since", before)) == failed
        assert await refusal(put_if("If-Modified-Since", stamp)) == failed
        await put_if("If-Unmodified-Since", stamp)
        await put_if("If-Modified-Since", before)


async def test_a_race_to_create_has_one_winner(s3: Any) -> None:
    bodies = [os.urandom(300_000) for _ in range(8)]
    results = await asyncio.gather(*(put(s3, "a", body, IfNoneMatch="*") for body in bodies), return_exceptions=True)
    winners = [body for body, result in zip(bodies, results, strict=True) if isinstance(result, str)]
    assert len(winners) == 1
    assert await get(s3, "a") == winners[0]


async def test_content_md5_is_checked(s3: Any, refusal: Any) -> None:
    right = base64.b64encode(hashlib.md5(b"body").digest()).decode()
    assert await refusal(put(s3, "a", b"BODY", ContentMD5=right)) == (400, "BadDigest")
    assert await refusal(put(s3, "a", b"body", ContentMD5="bm8=")) == (400, "InvalidDigest")
    assert (await s3.list_objects_v2(Bucket=BUCKET))["KeyCount"] == 0
    await put(s3, "a", b"body", ContentMD5=right)


async def test_a_reader_keeps_the_object_that_it_began_with(s3: Any) -> None:
    old, new = os.urandom(8 * 2**20), os.urandom(8 * 2**20)
    await put(s3, "a", old)
    answer = await s3.get_object(Bucket=BUCKET, Key="a")
    head = await answer["Body"].read(10)
    await put(s3, "a", new)
    assert head + await answer["Body"].read() == old


async def test_last_modified_is_cut_off_to_seconds_in_headers_and_to_milliseconds_in_listings(
    tmp_path: Path, keys: Any, connect: Any
) -> None:
    instant = int(time.time()) + 0.9876
    async with serve(tmp_path, keys, clock=lambda: instant) as server:
        s3 = await connect(server)
        await put(s3, "a")
        head = await s3.head_object(Bucket=BUCKET, Key="a")
        listed = (await s3.list_objects_v2(Bucket=BUCKET))["Contents"][0]
    assert head["LastModified"].timestamp() == int(instant)
    assert listed["LastModified"].timestamp() == pytest.approx(int(instant) + 0.987, abs=1e-6)


async def test_delete_objects(s3: Any) -> None:
    for key in ("a", "b", "c"):
        await put(s3, key)
    answer = await s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "a"}, {"Key": "c"}, {"Key": "no"}]})
    assert [entry["Key"] for entry in answer["Deleted"]] == ["a", "c", "no"]
    assert [entry["Key"] for entry in (await s3.list_objects_v2(Bucket=BUCKET))["Contents"]] == ["b"]


async def test_the_checksum_of_delete_objects_is_checked(s3: Any, refusal: Any) -> None:
    def damage(request: Any, **_: Any) -> None:
        request.body = request.body.replace(b"<Key>b<", b"<Key>a<")

    await put(s3, "a")
    s3.meta.events.register("before-send.s3.DeleteObjects", damage)
    call = s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "b"}]})
    assert await refusal(call) == (400, "BadDigest")
    assert await get(s3, "a") == b"x"


async def test_what_r2_does_not_do_is_refused_not_ignored(s3: Any, refusal: Any) -> None:
    unsupported = [
        s3.put_object(Bucket=BUCKET, Key="a", Body=b"", ACL="public-read"),
        s3.put_object(Bucket=BUCKET, Key="a", Body=b"", Tagging="a=b"),
        s3.put_object(Bucket=BUCKET, Key="a", Body=b"", ServerSideEncryption="aws:kms"),
        s3.get_object(Bucket=BUCKET, Key="a", ExpectedBucketOwner="1" * 12),
        s3.get_object(Bucket=BUCKET, Key="a", VersionId="1"),
        s3.copy_object(Bucket=BUCKET, Key="a", CopySource=f"{BUCKET}/b"),
        s3.get_bucket_policy(Bucket=BUCKET),
        s3.list_objects(Bucket=BUCKET),
        s3.delete_object(Bucket=BUCKET, Key="a", IfMatch="x"),
    ]
    for call in unsupported:
        assert await refusal(call) == (501, "NotImplemented")


async def test_one_write_a_second_for_each_key(tmp_path: Path, keys: Any, connect: Any, refusal: Any) -> None:
    now = time.time()
    async with serve(tmp_path, keys, clock=lambda: now) as server:
        s3 = await connect(server)
        await put(s3, "a", b"one")
        await put(s3, "b", b"one")
        now += 0.9
        assert await refusal(put(s3, "a", b"two")) == (429, "TooManyRequests")
        assert await refusal(put(s3, "a", b"two", IfNoneMatch="*")) == (412, "PreconditionFailed")
        assert await get(s3, "a") == b"one"
        now += 0.2
        await put(s3, "a", b"three")
        assert await get(s3, "a") == b"three"
