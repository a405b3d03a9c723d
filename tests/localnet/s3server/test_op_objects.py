"""Objects through the door, by an unmodified client."""

import hashlib
import os
from typing import Any

BUCKET = "gradients"


async def put(s3: Any, key: str, body: bytes = b"x", **more: Any) -> str:
    return (await s3.put_object(Bucket=BUCKET, Key=key, Body=body, **more))["ETag"].strip('"')


async def get(s3: Any, key: str, **more: Any) -> bytes:
    return await (await s3.get_object(Bucket=BUCKET, Key=key, **more))["Body"].read()


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
    assert [entry["Key"] for entry in (await s3.list_objects_v2(Bucket=BUCKET))["Contents"]] == ["gradient-1-2.pt"]
    await s3.delete_object(Bucket=BUCKET, Key="gradient-1-2.pt")
    assert (await s3.list_objects_v2(Bucket=BUCKET))["KeyCount"] == 0


async def test_an_empty_object(s3: Any) -> None:
    await put(s3, "empty", b"")
    assert await get(s3, "empty") == b""
