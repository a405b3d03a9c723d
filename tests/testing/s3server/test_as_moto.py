"""The rules that plain S3 also has, on this server and on moto, with an unmodified client."""

import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import pytest_asyncio
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from tplr.testing.s3server import Rules, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB = 2**20
KEY = "1" * 32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ours", "moto"])
async def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """``.s3``, a client, and ``.bucket``."""
    secret, bucket = KEY * 2, "bucket"
    settings = {"aws_access_key_id": KEY, "aws_secret_access_key": secret, "region_name": "us-east-1"}
    config: dict[str, Any] = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1},
        "s3": {"addressing_style": "path"},
    }
    keys = {KEY: {"secret": secret, "buckets": {bucket: "read-write"}}}
    async with serve(tmp_path_factory.mktemp("s3"), keys, rules=Rules(one_write_per_second=False)) as server:
        endpoint = server.endpoint
        if request.param == "moto":
            moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
            moto.start()
            request.addfinalizer(moto.stop)
            endpoint = "http://{}:{}".format(*moto.get_host_and_port())
            maker = boto3.client("s3", endpoint_url=endpoint, config=Config(**config), **settings)
            maker.create_bucket(Bucket=bucket)
            maker.close()
        session = get_session()
        async with session.create_client("s3", endpoint_url=endpoint, config=AioConfig(**config), **settings) as s3:
            yield SimpleNamespace(s3=s3, bucket=bucket)


async def code(call: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        await call
    response: Any = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


async def put(place: Any, key: str, body: bytes, **more: Any) -> str:
    return (await place.s3.put_object(Bucket=place.bucket, Key=key, Body=body, **more))["ETag"]


async def get(place: Any, key: str, **more: Any) -> bytes:
    return await (await place.s3.get_object(Bucket=place.bucket, Key=key, **more))["Body"].read()


async def test_etag_metadata_and_overwrite(place: Any) -> None:
    assert await put(place, "a", b"one", Metadata={"n": "1"}) == f'"{hashlib.md5(b"one").hexdigest()}"'
    head = await place.s3.head_object(Bucket=place.bucket, Key="a")
    assert (head["ContentLength"], head["Metadata"], head["LastModified"].microsecond) == (3, {"n": "1"}, 0)
    await put(place, "a", b"other")
    assert await get(place, "a") == b"other"


async def test_what_is_not_there(place: Any) -> None:
    assert await code(place.s3.get_object(Bucket=place.bucket, Key="none")) == (404, "NoSuchKey")
    assert await code(place.s3.head_object(Bucket=place.bucket, Key="none")) == (404, "404")
    assert await code(place.s3.get_object(Bucket="nowhere", Key="none")) == (404, "NoSuchBucket")
    await place.s3.delete_object(Bucket=place.bucket, Key="none")


async def test_ranges(place: Any) -> None:
    await put(place, "r", bytes(range(100)))
    for asked, first, last in (("bytes=0-9", 0, 9), ("bytes=90-", 90, 99), ("bytes=95-1000", 95, 99)):
        answer = await place.s3.get_object(Bucket=place.bucket, Key="r", Range=asked)
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert answer["ContentRange"] == f"bytes {first}-{last}/100"
        assert await answer["Body"].read() == bytes(range(first, last + 1))
    call = place.s3.get_object(Bucket=place.bucket, Key="r", Range="bytes=100-")
    assert await code(call) == (416, "InvalidRange")


async def test_conditions(place: Any) -> None:
    etag = await put(place, "c", b"one", IfNoneMatch="*")
    assert (await code(put(place, "c", b"two", IfNoneMatch="*")))[0] == 412
    assert (await code(place.s3.get_object(Bucket=place.bucket, Key="c", IfMatch='"other"')))[0] == 412
    assert (await code(place.s3.get_object(Bucket=place.bucket, Key="c", IfNoneMatch=etag)))[0] == 304
    assert await get(place, "c", IfMatch=etag) == b"one"
    written = (await place.s3.head_object(Bucket=place.bucket, Key="c"))["LastModified"]
    before = written - timedelta(seconds=9)
    assert (await code(get(place, "c", IfModifiedSince=written)))[0] == 304
    assert (await code(get(place, "c", IfUnmodifiedSince=before)))[0] == 412
    assert await get(place, "c", IfModifiedSince=before) == b"one"
    assert await get(place, "c", IfUnmodifiedSince=written) == b"one"


async def test_listing_in_pages(place: Any) -> None:
    for key in ("l/a", "l/b/1", "l/b/2", "l/c", "m"):
        await put(place, key, b"x")
    found, after = [], ""
    while True:
        page = await place.s3.list_objects_v2(Bucket=place.bucket, Prefix="l/", StartAfter=after, MaxKeys=2)
        found += [entry["Key"] for entry in page["Contents"]]
        after = found[-1]
        if not page["IsTruncated"]:
            break
    assert found == ["l/a", "l/b/1", "l/b/2", "l/c"]
    page = await place.s3.list_objects_v2(Bucket=place.bucket, Prefix="l/", Delimiter="/")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["l/b/"]
    assert [entry["Key"] for entry in page["Contents"]] == ["l/a", "l/c"]


async def test_delete_objects(place: Any) -> None:
    for key in ("d1", "d2"):
        await put(place, key, b"x")
    await place.s3.delete_objects(Bucket=place.bucket, Delete={"Objects": [{"Key": "d1"}]})
    assert await code(place.s3.get_object(Bucket=place.bucket, Key="d1")) == (404, "NoSuchKey")
    assert await get(place, "d2") == b"x"


async def upload(place: Any, key: str, *bodies: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    target = {"Bucket": place.bucket, "Key": key}
    target["UploadId"] = (await place.s3.create_multipart_upload(**target))["UploadId"]
    parts = [
        {"PartNumber": number, "ETag": (await place.s3.upload_part(**target, PartNumber=number, Body=body))["ETag"]}
        for number, body in enumerate(bodies, 1)
    ]
    return target, parts


async def test_parts_become_one_object(place: Any) -> None:
    bodies = [b"a" * 5 * MIB, b"b" * 100]
    target, parts = await upload(place, "p", *bodies)
    assert await code(place.s3.get_object(Bucket=place.bucket, Key="p")) == (404, "NoSuchKey")
    listed = (await place.s3.list_parts(**target))["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed] == [(1, 5 * MIB), (2, 100)]
    under_way = (await place.s3.list_multipart_uploads(Bucket=place.bucket))["Uploads"]
    assert [entry["Key"] for entry in under_way] == ["p"]
    answer = await place.s3.complete_multipart_upload(**target, MultipartUpload={"Parts": parts})
    digests = b"".join(hashlib.md5(body).digest() for body in bodies)
    assert answer["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-2"'
    assert await get(place, "p") == b"".join(bodies)


async def test_parts_that_are_refused(place: Any) -> None:
    target, parts = await upload(place, "q", b"a" * 1000, b"b" * 1000)
    complete = place.s3.complete_multipart_upload
    assert await code(complete(**target, MultipartUpload={"Parts": parts})) == (400, "EntityTooSmall")
    wrong = [{**parts[0], "ETag": '"' + "0" * 32 + '"'}]
    assert await code(complete(**target, MultipartUpload={"Parts": wrong})) == (400, "InvalidPart")


async def test_an_aborted_upload_is_gone(place: Any) -> None:
    target, _ = await upload(place, "z", b"x")
    await place.s3.abort_multipart_upload(**target)
    assert await code(place.s3.list_parts(**target)) == (404, "NoSuchUpload")
    assert await code(place.s3.get_object(Bucket=place.bucket, Key="z")) == (404, "NoSuchKey")
