"""Authentication: signatures, clocks, regions. The vectors are those of the S3 API reference."""

import datetime
from typing import Any

import aiohttp
import botocore.auth
import pytest
from multidict import CIMultiDict

from tplr.testing.s3server import Server
from tplr.testing.s3server.request import S3Request
from tplr.testing.s3server.sigv4 import read_claim, sign

AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
STRANGER = "4" * 32


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "signature"),
    [
        (
            "GET",
            "/test.txt",
            {},
            {"range": "bytes=0-9", "x-amz-content-sha256": EMPTY},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test$file.text",
            {},
            {
                "date": "Fri, 24 May 2013 00:00:00 GMT",
                "x-amz-content-sha256": "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
                "x-amz-storage-class": "REDUCED_REDUNDANCY",
            },
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET",
            "/",
            {"prefix": "J", "max-keys": "2"},
            {"x-amz-content-sha256": EMPTY},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
        (
            "GET",
            "/",
            {"lifecycle": ""},
            {"x-amz-content-sha256": EMPTY},
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
    ],
)
def test_the_signatures_of_the_published_examples(
    method: str, path: str, query: dict[str, str], headers: dict[str, str], signature: str
) -> None:
    sent = {"host": "examplebucket.s3.amazonaws.com", "x-amz-date": "20130524T000000Z", **headers}
    sent["Authorization"] = (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders={';'.join(sorted(sent))},Signature={signature}"
    )
    request = S3Request(
        method=method,
        path=path,
        bucket="",
        key="",
        query=query,
        headers=CIMultiDict(sent),
        content_length=None,
        content=None,  # pyright: ignore[reportArgumentType] - a signature never reads it
    )
    assert sign(read_claim(request), request, AWS_SECRET) == signature


async def test_an_unknown_key_is_unauthorized(server: Server, connect: Any, refusal: Any) -> None:
    s3 = await connect(server, STRANGER)
    assert await refusal(s3.list_objects_v2(Bucket="gradients")) == (401, "Unauthorized")
    assert await refusal(s3.head_object(Bucket="gradients", Key="a")) == (401, "401")


async def test_a_wrong_secret_is_seen(server: Server, connect: Any, refusal: Any) -> None:
    s3 = await connect(server, secret="0" * 64)
    assert await refusal(s3.list_objects_v2(Bucket="gradients")) == (403, "SignatureDoesNotMatch")
    assert await refusal(s3.list_objects_v2(Bucket="nowhere")) == (403, "SignatureDoesNotMatch")


async def test_without_a_signature_nothing_is_told(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/", "/gradients", "/gradients/a", "/nowhere/a", "/gradients?acl"):
            async with session.get(server.endpoint + path) as answer:
                assert answer.status == 401
                assert "<Code>Unauthorized</Code>" in await answer.text()


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Authorization", "Basic bWU6bWU=", 400),
        ("Authorization", "AWS4-HMAC-SHA256 Credential=a/b", 400),
        ("x-amz-date", "yesterday", 400),
        ("x-amz-date", "20200101T000000Z", 400),  # not the day of the credential's scope
        ("x-amz-content-sha256", "none", 400),
    ],
)
async def test_a_signature_that_can_not_be_read(s3: Any, refusal: Any, name: str, value: str, status: int) -> None:
    assert (await refusal(signed_elsewhere(s3, headers={name: value})))[0] == status


async def signed_elsewhere(s3: Any, **changes: Any) -> Any:
    """Lets the client sign, then changes its request: a path, a header."""

    def change(request: Any, **_: Any) -> None:
        if "url" in changes:
            request.url = request.url.replace(*changes["url"])
        for name, value in changes.get("headers", {}).items():
            request.headers[name] = value

    s3.meta.events.register("before-send.s3", change)
    try:
        return await s3.get_object(Bucket="gradients", Key="a")
    finally:
        s3.meta.events.unregister("before-send.s3", change)


async def test_a_signature_covers_path_query_and_headers(s3: Any, refusal: Any) -> None:
    await s3.put_object(Bucket="gradients", Key="a", Body=b"x")
    await s3.put_object(Bucket="gradients", Key="b", Body=b"x")
    mismatch = (403, "SignatureDoesNotMatch")
    assert await refusal(signed_elsewhere(s3, url=("/a", "/b"))) == mismatch
    assert await refusal(signed_elsewhere(s3, url=("/a", "/a?x-id=b"))) == mismatch
    assert await refusal(signed_elsewhere(s3, headers={"x-amz-content-sha256": EMPTY.replace("e", "f")})) == mismatch
    assert await refusal(signed_elsewhere(s3, headers={"x-amz-user-agent": "me"})) == (403, "AccessDenied")


@pytest.mark.parametrize(("minutes", "allowed"), [(-20, False), (-14, True), (14, True), (20, False)])
async def test_clocks_may_differ_by_a_quarter_of_an_hour(
    s3: Any, refusal: Any, monkeypatch: pytest.MonkeyPatch, minutes: int, allowed: bool
) -> None:
    true_time = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda *a, **k: true_time(*a, **k) + datetime.timedelta(minutes=minutes)
    )
    call = s3.list_objects_v2(Bucket="gradients")
    if allowed:
        await call
    else:
        assert await refusal(call) == (403, "RequestTimeTooSkewed")


async def test_regions(server: Server, connect: Any, refusal: Any) -> None:
    for region in ("us-east-1", "enam", "oc"):
        await (await connect(server, region=region)).list_objects_v2(Bucket="gradients")
    s3 = await connect(server, region="eu-central-1")
    assert await refusal(s3.list_objects_v2(Bucket="gradients")) == (400, "InvalidRegionName")
