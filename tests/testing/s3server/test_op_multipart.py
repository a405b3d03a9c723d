"""Multipart uploads by an unmodified client. Parts have at least 1 KiB here; R2's 5 MiB is only another number."""

import asyncio
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tplr.testing.s3server import Rules, serve

TARGET = {"Bucket": "checkpoints", "Key": "model/step-1"}


async def upload(s3: Any, *bodies: bytes, **more: Any) -> tuple[str, list[dict[str, Any]]]:
    upload_id = (await s3.create_multipart_upload(**TARGET, **more))["UploadId"]
    parts = []
    for number, body in enumerate(bodies, start=1):
        answer = await s3.upload_part(**TARGET, UploadId=upload_id, PartNumber=number, Body=body)
        assert answer["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
        parts.append({"PartNumber": number, "ETag": answer["ETag"]})
    return upload_id, parts


async def complete(s3: Any, upload_id: str, parts: list[dict[str, Any]], **more: Any) -> Any:
    return await s3.complete_multipart_upload(**TARGET, UploadId=upload_id, MultipartUpload={"Parts": parts}, **more)


def test_the_least_part_has_5_mib() -> None:
    assert Rules().min_part_bytes == 5 * 2**20


async def test_parts_become_one_object(s3: Any, refusal: Any) -> None:
    bodies = [os.urandom(1500), os.urandom(1500), os.urandom(700)]
    upload_id, parts = await upload(s3, *bodies, Metadata={"step": "1"}, ContentType="x/y")
    assert await refusal(s3.get_object(**TARGET)) == (404, "NoSuchKey")
    answer = await complete(s3, upload_id, parts)
    digests = b"".join(hashlib.md5(body).digest() for body in bodies)
    assert answer["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-3"'
    got = await s3.get_object(**TARGET)
    assert await got["Body"].read() == b"".join(bodies)
    assert (got["ETag"], got["Metadata"], got["ContentType"]) == (answer["ETag"], {"step": "1"}, "x/y")
    assert "Uploads" not in await s3.list_multipart_uploads(Bucket="checkpoints")
    # R2 answers a second complete like this; a client must check whether the first one succeeded.
    assert await refusal(complete(s3, upload_id, parts)) == (404, "NoSuchUpload")


@pytest.mark.parametrize(
    ("sizes", "code"),
    [
        ((1500, 1500, 1500), None),
        ((10,), None),
        ((1500, 1400, 1000), "InvalidPart"),
        ((1500, 1500, 1600), "InvalidPart"),
        ((1000, 1000, 10), "EntityTooSmall"),
    ],
)
async def test_all_parts_but_the_last_have_one_length_and_enough_of_it(
    s3: Any, refusal: Any, sizes: tuple[int, ...], code: str | None
) -> None:
    upload_id, parts = await upload(s3, *(bytes(size) for size in sizes))
    if code is None:
        await complete(s3, upload_id, parts)
        assert (await s3.head_object(**TARGET))["ContentLength"] == sum(sizes)
    else:
        assert await refusal(complete(s3, upload_id, parts)) == (400, code)
        assert "Uploads" in await s3.list_multipart_uploads(Bucket="checkpoints")  # nothing is lost


async def test_a_complete_names_parts_that_exist_in_rising_order(s3: Any, refusal: Any) -> None:
    upload_id, parts = await upload(s3, bytes(1500), bytes(1500))
    assert await refusal(complete(s3, upload_id, parts[::-1])) == (400, "InvalidPartOrder")
    assert await refusal(complete(s3, upload_id, [parts[0], parts[0]])) == (400, "InvalidPartOrder")
    other = {"PartNumber": 2, "ETag": '"' + "0" * 32 + '"'}
    assert await refusal(complete(s3, upload_id, [parts[0], other])) == (400, "InvalidPart")
    assert await refusal(complete(s3, upload_id, [*parts, {**parts[1], "PartNumber": 3}])) == (400, "InvalidPart")
    assert await refusal(complete(s3, upload_id, [])) == (400, "MalformedXML")
    await complete(s3, upload_id, parts[1:])  # a client may choose the parts
    assert (await s3.head_object(**TARGET))["ContentLength"] == 1500


async def test_a_part_may_be_sent_again(s3: Any, refusal: Any) -> None:
    upload_id, parts = await upload(s3, b"a" * 1500)
    again = await s3.upload_part(**TARGET, UploadId=upload_id, PartNumber=1, Body=b"b" * 1500)
    assert await refusal(complete(s3, upload_id, parts)) == (400, "InvalidPart")
    await complete(s3, upload_id, [{"PartNumber": 1, "ETag": again["ETag"]}])
    assert await (await s3.get_object(**TARGET))["Body"].read() == b"b" * 1500


async def test_an_aborted_upload_is_gone(s3: Any, tmp_path: Path, refusal: Any) -> None:
    upload_id, parts = await upload(s3, bytes(1500))
    await s3.abort_multipart_upload(**TARGET, UploadId=upload_id)
    gone = (404, "NoSuchUpload")
    assert await refusal(s3.upload_part(**TARGET, UploadId=upload_id, PartNumber=2, Body=b"")) == gone
    assert await refusal(complete(s3, upload_id, parts)) == gone
    assert await refusal(s3.list_parts(**TARGET, UploadId=upload_id)) == gone
    assert await refusal(s3.abort_multipart_upload(**TARGET, UploadId=upload_id)) == gone
    assert list((tmp_path / "root/buckets/checkpoints/uploads").iterdir()) == []


async def test_an_upload_id_is_no_path_and_belongs_to_one_key(s3: Any, refusal: Any) -> None:
    upload_id, _ = await upload(s3, bytes(1500))
    for foreign in ("../../gradients/uploads", "x", upload_id[::-1]):
        assert await refusal(s3.list_parts(**TARGET, UploadId=foreign)) == (404, "NoSuchUpload")
    call = s3.upload_part(Bucket="checkpoints", Key="another", UploadId=upload_id, PartNumber=1, Body=b"")
    assert await refusal(call) == (404, "NoSuchUpload")


async def test_an_object_has_at_most_5_tib(tmp_path: Path, keys: Any, connect: Any, refusal: Any) -> None:
    assert Rules().max_object_bytes == int(4.995 * 2**40)
    rules = Rules(one_write_per_second=False, min_part_bytes=1024, max_put_bytes=1500, max_object_bytes=2600)
    async with serve(tmp_path, keys, rules=rules) as small:
        s3 = await connect(small)
        upload_id, parts = await upload(s3, bytes(1400), bytes(1200))
        await complete(s3, upload_id, parts)
        upload_id, parts = await upload(s3, bytes(1400), bytes(1201))
        assert await refusal(complete(s3, upload_id, parts)) == (400, "EntityTooLarge")
        too_long = s3.upload_part(**TARGET, UploadId=upload_id, PartNumber=3, Body=bytes(1501))
        assert await refusal(too_long) == (400, "EntityTooLarge")


async def test_part_numbers_are_1_to_10000(s3: Any, refusal: Any) -> None:
    upload_id, _ = await upload(s3)
    for number, allowed in ((0, False), (1, True), (10_000, True), (10_001, False)):
        call = s3.upload_part(**TARGET, UploadId=upload_id, PartNumber=number, Body=b"")
        if allowed:
            await call
        else:
            assert await refusal(call) == (400, "InvalidArgument")


async def test_listings_of_parts_and_uploads_come_in_pages(s3: Any) -> None:
    upload_id, parts = await upload(s3, bytes(1500), bytes(1400), bytes(1300))
    pages = s3.get_paginator("list_parts").paginate(**TARGET, UploadId=upload_id, PaginationConfig={"PageSize": 2})
    found = [part async for page in pages for part in page["Parts"]]
    assert [(part["PartNumber"], part["Size"]) for part in found] == [(1, 1500), (2, 1400), (3, 1300)]
    assert [part["ETag"] for part in found] == [part["ETag"] for part in parts]
    ids = [upload_id] + [(await upload(s3))[0] for _ in range(2)]
    await s3.create_multipart_upload(Bucket="checkpoints", Key="a")
    await s3.create_multipart_upload(Bucket="checkpoints", Key="z")
    pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket="checkpoints", PaginationConfig={"PageSize": 2})
    listed = [entry async for page in pages for entry in page["Uploads"]]
    assert [entry["Key"] for entry in listed] == ["a", *[TARGET["Key"]] * 3, "z"]
    assert {entry["UploadId"] for entry in listed[1:4]} == set(ids)
    answer = await s3.list_multipart_uploads(Bucket="checkpoints", Prefix="model/")
    assert len(answer["Uploads"]) == 3


async def test_a_failed_condition_aborts_the_upload(s3: Any, refusal: Any) -> None:
    await s3.put_object(**TARGET, Body=b"there")
    upload_id, parts = await upload(s3, bytes(1500))
    assert await refusal(complete(s3, upload_id, parts, IfNoneMatch="*")) == (412, "PreconditionFailed")
    assert await refusal(s3.list_parts(**TARGET, UploadId=upload_id)) == (404, "NoSuchUpload")
    assert await (await s3.get_object(**TARGET))["Body"].read() == b"there"


async def test_of_two_completes_at_once_one_is_told(s3: Any) -> None:
    upload_id, parts = await upload(s3, bytes(2**20), bytes(2**20))
    answers = await asyncio.gather(*(complete(s3, upload_id, parts) for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(answer, dict) for answer in answers) == 1
    refused = [answer for answer in answers if isinstance(answer, ClientError)]
    assert [answer.response["Error"]["Code"] for answer in refused] == ["NoSuchUpload"] * 3


async def test_a_complete_is_a_write_of_its_key_and_parts_are_not(
    tmp_path: Path, keys: Any, connect: Any, refusal: Any
) -> None:
    now = time.time()
    async with serve(tmp_path, keys, clock=lambda: now) as server:
        s3 = await connect(server)
        upload_id, parts = await upload(s3, b"part")
        await s3.put_object(**TARGET, Body=b"x")
        assert await refusal(complete(s3, upload_id, parts)) == (429, "TooManyRequests")
        now += 1
        await complete(s3, upload_id, parts)


async def test_after_a_week_an_upload_is_aborted(tmp_path: Path, keys: Any, connect: Any, refusal: Any) -> None:
    now = time.time()
    rules = Rules(min_part_bytes=1024, max_clock_skew=1e9)
    async with serve(tmp_path, keys, rules=rules, clock=lambda: now) as server:
        s3 = await connect(server)
        upload_id, parts = await upload(s3, os.urandom(1500))
        now += 7 * 24 * 3600 - 1
        listed = await s3.list_multipart_uploads(Bucket="checkpoints")
        assert [one["UploadId"] for one in listed["Uploads"]] == [upload_id]
        now += 2
        assert await refusal(complete(s3, upload_id, parts)) == (404, "NoSuchUpload")
        assert "Uploads" not in await s3.list_multipart_uploads(Bucket="checkpoints")
        assert list((server.objects.folder("checkpoints") / "uploads").iterdir()) == []
