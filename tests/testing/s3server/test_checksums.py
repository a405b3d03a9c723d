"""``x-amz-checksum-*``: checked, stored, returned on request, and composed for multipart objects."""

import base64
import hashlib
import zlib
from typing import Any

import pytest

BUCKET = "gradients"


def crc32(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "big")


DIGESTS = {
    "CRC32": crc32,
    "SHA1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
    "SHA256": lambda body: hashlib.sha256(body).digest(),
}


def checksum(name: str, body: bytes) -> str:
    return base64.b64encode(DIGESTS[name](body)).decode()


@pytest.mark.parametrize("name", DIGESTS)
async def test_a_sent_checksum_is_checked_and_returned(s3: Any, refusal: Any, name: str) -> None:
    field, right, wrong = f"Checksum{name}", checksum(name, b"body"), checksum(name, b"other")
    put = {"Bucket": BUCKET, "Key": "a", "Body": b"body"}
    assert (await s3.put_object(**put, **{field: right}))[field] == right
    for wanted in (s3.head_object, s3.get_object):
        assert (await wanted(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED"))[field] == right
        assert field not in await wanted(Bucket=BUCKET, Key="a")
    part_of_it = await s3.get_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED", Range="bytes=0-1")
    assert field not in part_of_it  # it is the checksum of the whole object
    assert await refusal(s3.put_object(**put, **{field: wrong})) == (400, "BadDigest")
    assert await refusal(s3.put_object(**put, **{field: "bm8="})) == (400, "InvalidDigest")
    assert await refusal(s3.put_object(**put, **{field: "?"})) == (400, "InvalidDigest")
    assert await (await s3.get_object(Bucket=BUCKET, Key="a"))["Body"].read() == b"body"


@pytest.mark.parametrize("name", DIGESTS)
async def test_a_multipart_object_has_the_checksum_of_its_parts_checksums(s3: Any, refusal: Any, name: str) -> None:
    field, bodies = f"Checksum{name}", (b"a" * 1500, b"b" * 1000)
    target = {"Bucket": BUCKET, "Key": "m"}
    upload = {**target, "UploadId": (await s3.create_multipart_upload(**target, ChecksumAlgorithm=name))["UploadId"]}
    parts = []
    for number, body in enumerate(bodies, start=1):
        sent = {field: checksum(name, body)}
        answer = await s3.upload_part(**upload, PartNumber=number, Body=body, **sent)
        assert answer[field] == sent[field]
        parts.append({"PartNumber": number, "ETag": answer["ETag"], **sent})
    other = [parts[0], {**parts[1], field: checksum(name, b"other")}]
    call = s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": other})
    assert await refusal(call) == (400, "InvalidPart")
    done = await s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    composite = checksum(name, b"".join(DIGESTS[name](body) for body in bodies)) + "-2"
    assert done[field] == composite
    assert (await s3.head_object(**target, ChecksumMode="ENABLED"))[field] == composite


async def test_every_part_of_an_upload_with_a_checksum_carries_it(s3: Any, refusal: Any) -> None:
    target = {"Bucket": BUCKET, "Key": "m"}
    upload = {**target, "UploadId": (await s3.create_multipart_upload(**target, ChecksumAlgorithm="CRC32"))["UploadId"]}
    answer = await s3.upload_part(**upload, PartNumber=1, Body=b"a", ChecksumSHA256=checksum("SHA256", b"a"))
    call = s3.complete_multipart_upload(
        **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": answer["ETag"]}]}
    )
    assert await refusal(call) == (400, "InvalidPart")


async def test_a_checksum_that_is_not_computed_here_is_refused(s3: Any, refusal: Any) -> None:
    refused = (501, "NotImplemented")
    call = s3.put_object(Bucket=BUCKET, Key="a", Body=b"", ChecksumCRC64NVME="AAAAAAAAAAA=")
    assert await refusal(call) == refused
    call = s3.create_multipart_upload(Bucket=BUCKET, Key="a", ChecksumAlgorithm="CRC64NVME")
    assert await refusal(call) == refused


async def test_an_announced_checksum_is_sent(s3: Any, refusal: Any) -> None:
    def announce(params: Any, **_: Any) -> None:
        params["headers"]["x-amz-sdk-checksum-algorithm"] = "SHA256"

    s3.meta.events.register("before-call.s3.PutObject", announce)
    assert await refusal(s3.put_object(Bucket=BUCKET, Key="a", Body=b"")) == (400, "InvalidArgument")
