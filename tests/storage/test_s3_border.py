"""What leaves a call: our errors, and no open answer."""

import asyncio
import errno

import aiohttp
import pytest
from botocore.exceptions import EndpointConnectionError

from tplr.errors import ObjectNotFound, StoreUnavailable
from tplr.storage.s3_border import translate_errors

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk full"),
        (ConnectionResetError(), "connection failed"),
        (aiohttp.ClientPayloadError("short"), "connection failed"),
        (EndpointConnectionError(endpoint_url="http://x"), "connection failed"),
        (TimeoutError(), "silent"),
        (ValueError("Invalid timestamp"), "can't be read"),
    ],
)
async def test_foreign_errors_stop_at_the_border(foreign: Exception, words: str) -> None:
    with pytest.raises(StoreUnavailable, match=words) as caught:
        async with translate_errors("bucket", "key", 5):
            raise foreign
    assert caught.value.__cause__ is foreign


async def test_ours_pass_the_border_unchanged() -> None:
    ours = ObjectNotFound("gone")
    with pytest.raises(ObjectNotFound) as caught:
        async with translate_errors("bucket", "key", 5):
            raise ours
    assert caught.value is ours


async def test_the_deadline_is_told_from_other_silences() -> None:
    with pytest.raises(StoreUnavailable, match="gave up"):
        async with translate_errors("bucket", "key", 0.01):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    "headers", [b"Last-Modified: 99999999999999999999999\r\n", b"ETag: \xff\xfe\r\n"], ids=["date", "not UTF-8"]
)
async def test_answers_that_botocore_can_not_read_are_closed(raw_server, connect, headers: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + headers + b"\r\n")

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    with pytest.raises(StoreUnavailable):
        await store.get("k", max_bytes=1000)
    # It would stay open, and one of the client's connections with it, for as long as the server likes.
    await asyncio.wait_for(server.closed.wait(), 10)
