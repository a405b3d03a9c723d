"""A bad network and a hostile server: every call ends, within bounds, with an error of this package."""

import asyncio
import contextlib
import hashlib
import logging
import re
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tplr.errors import ObjectTooLarge, PreconditionFailed, StoreError, StoreUnavailable
from tplr.storage import ObjectStore, S3Store, TransferLimits, progress
from tplr.testing.s3server import Reset

pytestmark = pytest.mark.asyncio(loop_scope="module")

HASTY = TransferLimits(call_seconds=0.4, grace_seconds=0.2, download_floor=2**20)
FACTS = b'ETag: "abc"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n'
CALLS: dict[str, Callable[[ObjectStore, Path], Awaitable[object]]] = {
    "head": lambda store, path: store.head("k"),
    "get": lambda store, path: store.get("k", max_bytes=2**20),
    "get_file": lambda store, path: store.get_file("k", path, max_bytes=2**20),
    "put": lambda store, path: store.put("k", b"data"),
    "list": lambda store, path: store.list(),
    "delete": lambda store, path: store.delete("k"),
}
ALL_CALLS = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
DOWNLOADS = pytest.mark.parametrize("call", [CALLS["get"], CALLS["get_file"]], ids=["get", "get_file"])


def says(head: bytes, body: bytes = b"", *, forever: bool = False, every: float = 0.0) -> Callable:
    """Return an answer; ``forever`` repeats the body until the client disconnects, with pauses of ``every`` seconds."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head.replace(b"\n", b"\r\n").replace(b"\r\r", b"\r") + b"\r\n" + body)
        await writer.drain()
        while forever:
            writer.write(body)
            await writer.drain()
            await asyncio.sleep(every)

    return answer


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


@ALL_CALLS
async def test_no_answer_ends_at_the_deadline(raw_server, connect, tmp_path: Path, call) -> None:
    server = await raw_server(silence)
    store = await connect(server.endpoint, HASTY)
    with pytest.raises(StoreUnavailable, match="timed out"):
        await call(store, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@ALL_CALLS
async def test_a_closed_connection(raw_server, connect, tmp_path: Path, call) -> None:
    server = await raw_server(hang_up)
    with pytest.raises(StoreUnavailable, match="connection failed"):
        await call(await connect(server.endpoint), tmp_path / "file")
    # A read that broke on a kept connection is sent again once; the caller handles everything else.
    assert len(server.heads) <= 2


async def test_nobody_listens(connect) -> None:
    with pytest.raises(StoreUnavailable, match="connection failed"):
        await (await connect("http://127.0.0.1:9")).head("k")


async def test_a_client_within_other_seconds(raw_server, connect) -> None:
    server = await raw_server(silence)
    store = await connect(server.endpoint, TransferLimits(call_seconds=3600))
    with pytest.raises(StoreUnavailable, match="timed out"):
        await S3Store(store.client.within(0.1)).get("k", max_bytes=1)


@ALL_CALLS
async def test_redirects_are_not_followed(raw_server, connect, tmp_path: Path, call) -> None:
    elsewhere = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n"))
    answer = says(f"HTTP/1.1 307 Moved\r\nLocation: {elsewhere.endpoint}/x\r\nContent-Length: 0\r\n".encode())
    server = await raw_server(answer)
    with pytest.raises(StoreError):
        await call(await connect(server.endpoint), tmp_path / "file")
    assert elsewhere.heads == []
    assert len(server.heads) == 1


@pytest.mark.parametrize("status", [b"500 Oops", b"404 Missing"])
@pytest.mark.parametrize("call", [CALLS["get"], CALLS["put"]], ids=["get", "put"])
async def test_an_endless_error_body_is_not_kept(raw_server, connect, tmp_path: Path, call, status: bytes) -> None:
    server = await raw_server(says(b"HTTP/1.1 " + status + b"\r\n", b"x" * 2**20, forever=True))
    store = await connect(server.endpoint)
    tracemalloc.start()
    with pytest.raises(StoreUnavailable):
        await call(store, tmp_path / "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20


async def test_an_endless_listing_is_not_kept(raw_server, connect) -> None:
    body = b"<Contents><Key>a</Key></Contents>" * 2**15
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\n", body, forever=True))
    with pytest.raises(StoreUnavailable):
        await (await connect(server.endpoint)).list()


@pytest.mark.parametrize(("status", "call"), [(b"404 Missing", CALLS["get"]), (b"200 OK", CALLS["list"])])
async def test_a_chunk_of_negative_size_is_not_the_whole_body(
    raw_server, connect, tmp_path: Path, status: bytes, call
) -> None:
    head = b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n-1"
    server = await raw_server(says(head, b"x" * 2**20, forever=True))
    store = await connect(server.endpoint, HASTY)
    tracemalloc.start()
    with pytest.raises(StoreUnavailable):
        await call(store, tmp_path / "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20


async def test_a_listing_that_never_ascends_ends(raw_server, connect) -> None:
    entry = (
        b"<Contents><Key>same</Key><Size>1</Size><ETag>x</ETag><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
        b"</Contents>"
    )
    body = b"<ListBucketResult><IsTruncated>true</IsTruncated>" + entry + b"</ListBucketResult>"
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(body), body))
    with pytest.raises(StoreUnavailable, match="out of order"):
        await (await connect(server.endpoint)).list()
    assert len(server.heads) == 2


@DOWNLOADS
async def test_a_body_without_a_length_is_not_read(raw_server, connect, tmp_path: Path, call) -> None:
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\n" + FACTS, b"x" * 2**16, forever=True))
    with pytest.raises(StoreUnavailable, match="usable size"):
        await call(await connect(server.endpoint), tmp_path / "file")


@DOWNLOADS
async def test_what_is_announced_too_large_is_not_read(raw_server, connect, tmp_path: Path, call) -> None:
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n" + FACTS))
    with pytest.raises(ObjectTooLarge, match="99999999999"):
        await call(await connect(server.endpoint), tmp_path / "file")


@DOWNLOADS
async def test_a_slow_drip_ends(raw_server, connect, tmp_path: Path, call) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n" + FACTS
    server = await raw_server(says(head, b"x" * 100, forever=True, every=0.02))
    with pytest.raises(StoreUnavailable, match="too slow"):
        await call(await connect(server.endpoint, HASTY), tmp_path / "file")
    assert not (tmp_path / "file").exists()


async def test_the_floor_holds_within_a_long_time_out(raw_server, connect) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n" + FACTS
    server = await raw_server(says(head, b"x" * 100, forever=True, every=0.02))
    with pytest.raises(StoreUnavailable, match="too slow"):
        await (await connect(server.endpoint, replace(HASTY, call_seconds=3600))).get("k", max_bytes=2**20)


async def test_a_fast_body_may_take_longer_than_the_answer(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n" + FACTS + b"\r\n")
        for _ in range(10):
            await asyncio.sleep(0.06)
            writer.write(b"x" * 5000)

    server = await raw_server(answer)
    limits = TransferLimits(call_seconds=0.4, grace_seconds=30, download_floor=2**10)
    assert await (await connect(server.endpoint, limits)).get("k", max_bytes=2**20) == b"x" * 50000


async def test_a_long_request_tells_how_far_it_is(
    raw_server, connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n" + FACTS + b"\r\n" + b"x" * 4_000_000)
        await writer.drain()
        await asyncio.sleep(0.5)
        writer.write(b"x" * 5_000_000)

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.1)
    with caplog.at_level(logging.INFO):
        await store.get("k", max_bytes=9_000_000)
    told = [re.fullmatch(r"GET bucket/k: (\d) of 9 MB, [\d.]+ MB/s", message) for message in caplog.messages]
    assert "3" in [match and match[1] for match in told]  # the whole pieces of 4 MB
    assert all(told)


async def test_a_long_put_tells_how_far_it_is(
    raw_server, connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = await raw_server(silence)
    store = await connect(server.endpoint, TransferLimits(call_seconds=0.6, upload_floor=1e9))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.1)
    with caplog.at_level(logging.INFO), pytest.raises(StoreUnavailable):
        await store.put("k", bytes(2**21))
    assert "PUT bucket/k: 2 of 2 MB" in caplog.text


@DOWNLOADS
async def test_a_truncated_body(raw_server, connect, tmp_path: Path, call) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + FACTS + b"\r\n" + b"x" * 999)
        writer.close()

    server = await raw_server(answer)
    with pytest.raises(StoreUnavailable):
        await call(await connect(server.endpoint), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


async def test_never_more_than_announced(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n" + FACTS + b"\r\n0123456789")
        await asyncio.sleep(0.05)
        writer.write(b"GARBAGE " * 100)

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    for _ in range(2):
        assert await store.get("k", max_bytes=99) == b"0123456789"
        await asyncio.sleep(0.1)


async def test_two_lengths_at_once(raw_server, connect) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n" + FACTS
    server = await raw_server(says(head, b"14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n"))
    with contextlib.suppress(StoreUnavailable):
        assert await (await connect(server.endpoint)).get("k", max_bytes=99) == b"x" * 10


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\n", StoreUnavailable),
        (b"HTTP/1.1 206 Partial\r\n", StoreUnavailable),
        (b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 6-15/20\r\n", StoreUnavailable),
        (b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 5-99999/200000\r\n", StoreUnavailable),
        (b"HTTP/1.1 206 Partial\r\nContent-Range: bytes */20\r\n", StoreUnavailable),
        (b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 5-14/15\r\n", PreconditionFailed),
    ],
)
async def test_a_range_must_be_the_one_asked_for(raw_server, connect, head: bytes, kind: type[StoreError]) -> None:
    server = await raw_server(says(head + b"Content-Length: 10\r\n" + FACTS, b"0123456789"))
    with pytest.raises(kind) as caught:
        await (await connect(server.endpoint)).get("k", max_bytes=99, byte_range=(5, 16))
    assert type(caught.value) is kind


async def test_a_server_that_ignores_if_match(raw_server, connect) -> None:
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n" + FACTS, b"x"))
    store = await connect(server.endpoint)
    assert await store.get("k", max_bytes=1, if_match="abc") == b"x"
    with pytest.raises(PreconditionFailed):
        await store.get("k", max_bytes=1, if_match="abd")


@pytest.mark.parametrize(
    "headers",
    [
        b'Content-Length: 1\r\nETag: "abc"\r\nLast-Modified: yesterday\r\n',
        b'Content-Length: 1\r\nETag: "abc"\r\nLast-Modified: 99999999999999999999999\r\n',
        b'Content-Length: 1\r\nETag: "abc"\r\nLast-Modified: Wed, 21 Oct 99999999999 07:28:00 GMT\r\n',
        b'Content-Length: 1\r\nETag: "abc"\r\nLast-Modified: Wed, 99 Foo 2015 07:28:00 GMT\r\n',
        b'Content-Length: 1\r\nETag: "abc"\r\n',
        b"Content-Length: 1\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n",
        b"Content-Length: 1\r\nETag: \xff\xfe\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n",
        "Content-Length: 1\r\nETag: é\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n".encode(),
        b"Content-Length: 1\r\nETag: " + b"e" * 4000 + b"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n",
        b"Content-Length: -1\r\n" + FACTS,
        b"Content-Length: one\r\n" + FACTS,
        b"x: " + b"y" * 100_000 + b"\r\n" + FACTS,
        b"x-amz-missing-meta: many\r\nContent-Length: 1\r\n" + FACTS[:13],
    ],
)
@pytest.mark.parametrize("call", [CALLS["head"], CALLS["get"]], ids=["head", "get"])
async def test_headers_that_say_nothing(raw_server, connect, tmp_path: Path, call, headers: bytes) -> None:
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\n" + headers))
    with pytest.raises(StoreUnavailable):
        await call(await connect(server.endpoint, HASTY), tmp_path / "file")


@pytest.mark.parametrize(
    "headers", [b"Last-Modified: 99999999999999999999999\r\n", b"ETag: \xff\xfe\r\n"], ids=["date", "not UTF-8"]
)
async def test_a_response_that_can_not_be_read_is_closed(raw_server, connect, headers: bytes) -> None:
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + headers))
    store = await connect(server.endpoint)
    with pytest.raises(StoreUnavailable):
        await store.get("k", max_bytes=1000)
    # It would stay open for as long as the server likes.
    await asyncio.wait_for(server.closed.wait(), 10)


async def test_a_store_works_again_after_many_failures(r2) -> None:
    await r2.store.put("k", b"x")
    r2.server.faults.add("^HEAD", Reset(), times=None)
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            await r2.store.head("k")
    r2.server.faults.clear()
    assert (await r2.store.head("k")).size == 1


@ALL_CALLS
@pytest.mark.parametrize("answer", [b"\x00\x01\x02\n\n", b"HTTP/1.1 999999 What\n"])
async def test_answers_in_no_known_tongue(raw_server, connect, tmp_path: Path, call, answer: bytes) -> None:
    server = await raw_server(says(answer))
    with pytest.raises(StoreUnavailable):
        await call(await connect(server.endpoint, HASTY), tmp_path / "file")


@pytest.mark.parametrize("body", [b"<a>", b"", b"\xff\xfe", b"<a>" * 10_000, b"<x><IsTruncated>true</IsTruncated></x>"])
async def test_listings_that_are_none(raw_server, connect, body: bytes) -> None:
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(body), body))
    store = await connect(server.endpoint, HASTY)
    if body == b"" or b"IsTruncated" in body:
        assert await store.list() == []
    else:
        with pytest.raises(StoreUnavailable):
            await store.list()


async def test_an_empty_page_of_a_listing_is_not_its_end(raw_server, connect) -> None:
    """S3 stops a page after a number of keys that it has looked at, such as deleted ones in a bucket with versions."""
    entry = (
        b"<Contents><Key>k</Key><Size>1</Size><ETag>x</ETag><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
        b"</Contents>"
    )
    empty = b"<NextContinuationToken>a/b+c</NextContinuationToken><IsTruncated>true</IsTruncated>"

    async def answer(writer: asyncio.StreamWriter) -> None:
        last = "continuation-token=a%2Fb%2Bc" in server.heads[-1]
        body = b"<ListBucketResult>" + (entry if last else empty) + b"</ListBucketResult>"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    assert [info.key for info in await store.list()] == ["k"]
    assert len(server.heads) == 2


async def test_empty_pages_without_an_end_end_at_the_deadline(raw_server, connect) -> None:
    body = (
        b"<ListBucketResult><NextContinuationToken>t</NextContinuationToken><IsTruncated>true</IsTruncated>"
        b"</ListBucketResult>"
    )
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(body), body))
    with pytest.raises(StoreUnavailable, match="timed out"):
        await (await connect(server.endpoint, HASTY)).list()


async def test_throttling_without_a_body_is_unavailable(raw_server, connect) -> None:
    server = await raw_server(says(b"HTTP/1.1 429 Slow\r\nRetry-After: 5\r\nContent-Length: 0\r\n"))
    with pytest.raises(StoreUnavailable) as caught:
        await (await connect(server.endpoint)).head("k")
    assert caught.value.retry_after == 5.0


async def test_files_are_streamed_in_bounded_memory(raw_server, connect, tmp_path: Path) -> None:
    size = 48 * 2**20
    block = bytes(2**20)
    etag = hashlib.md5(bytes(size), usedforsecurity=False).hexdigest().encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        if server.heads[-1].startswith("PUT"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nDate: Wed, 21 Oct 2015 07:28:00 GMT\r\n")
            writer.write(b"ETag: %s\r\n\r\n" % etag)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % size + FACTS + b"\r\n")
        if server.heads[-1].startswith("HEAD"):
            return
        for _ in range(size // len(block)):
            writer.write(block)
            await writer.drain()

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    await store.head("warm-up")
    tracemalloc.start()
    await store.get_file("k", tmp_path / "file", max_bytes=size)
    await store.put_file("k", tmp_path / "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "file").stat().st_size == size
    assert peak < 16 * 2**20


async def test_a_cancelled_download_leaves_nothing(raw_server, connect, tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n" + FACTS
    server = await raw_server(says(head, b"x" * 1000, forever=True, every=0.01))
    store = await connect(server.endpoint, TransferLimits(grace_seconds=60))
    task = asyncio.create_task(store.get_file("k", tmp_path / "file", max_bytes=2**20))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []
