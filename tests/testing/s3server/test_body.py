"""Received bodies: checksums, streams that break off, encodings that R2 does not accept."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tplr.testing.s3server import Server

OWNER = "1" * 32


class Signer(S3SigV4Auth):
    """Signs a payload hash independently of the payload."""

    declared = "UNSIGNED-PAYLOAD"

    def payload(self, request: Any) -> str:
        return self.declared


def signed_put(server: Server, path: str, headers: dict[str, str], payload: str = Signer.declared) -> dict[str, str]:
    """Return the headers of a PUT with the owner's key; the body may be anything."""
    request = AWSRequest("PUT", server.endpoint + path, headers=headers)
    signer = Signer(Credentials(OWNER, OWNER * 2), "s3", "auto")
    signer.declared = payload
    signer.add_auth(request)
    return dict(request.headers)


async def test_a_signed_body_is_checked(server: Server, connect: Any, refusal: Any) -> None:
    s3 = await connect(server, signed=True)

    def tamper(request: Any, **_: Any) -> None:
        request.body = b"BODY"

    await s3.put_object(Bucket="gradients", Key="a", Body=b"body")
    s3.meta.events.register("before-send.s3", tamper)
    call = s3.put_object(Bucket="gradients", Key="a", Body=b"body")
    assert await refusal(call) == (400, "XAmzContentSHA256Mismatch")
    s3.meta.events.unregister("before-send.s3", tamper)
    assert await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read() == b"body"


@pytest.mark.parametrize(
    ("headers", "payload"),
    [({}, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"), ({"Content-Encoding": "gzip,aws-chunked"}, "UNSIGNED-PAYLOAD")],
)
async def test_aws_chunked_is_refused_as_r2_refuses_it(server: Server, headers: dict[str, str], payload: str) -> None:
    signed = signed_put(server, "/gradients/a", headers, payload)
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{server.endpoint}/gradients/a", data=b"4\r\nbody\r\n0\r\n\r\n", headers=signed) as answer,
    ):
        assert answer.status == 401
        assert "aws-chunked" in await answer.text()


async def test_a_body_of_unknown_length_is_refused(server: Server) -> None:
    async def stream() -> Any:
        yield b"body"

    headers = signed_put(server, "/gradients/a", {})
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{server.endpoint}/gradients/a", data=stream(), headers=headers) as answer,
    ):
        assert answer.status == 411
        assert "<Code>MissingContentLength</Code>" in await answer.text()


async def test_a_body_that_breaks_off_leaves_nothing(server: Server, s3: Any, tmp_path: Path, refusal: Any) -> None:
    await s3.put_object(Bucket="gradients", Key="a", Body=b"before")
    headers = signed_put(server, "/gradients/a", {})
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(f"PUT /gradients/a HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{head}".encode())
    writer.write(b"Content-Length: 4000000\r\n\r\n" + bytes(2_000_000))
    await writer.drain()
    drafts = tmp_path / "root" / "drafts"
    while not list(drafts.iterdir()):  # noqa: ASYNC110 - another connection's progress shows only on disk
        await asyncio.sleep(0.01)
    writer.close()
    while list(drafts.iterdir()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read() == b"before"
