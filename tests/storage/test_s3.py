"""Requests on the wire, their targets and rights; secrets are hidden; everything is closed."""

import asyncio
import contextlib
import gc
import hashlib
import logging
import re
import traceback
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tplr.config import Environment
from tplr.errors import AccessDenied, ConfigError, ObjectNotFound, PreconditionFailed, StoreError, StoreUnavailable
from tplr.schemas import Bucket
from tplr.storage import S3Connections, S3Store, TransferLimits, endpoint_url, s3_errors, s3_store
from tplr.storage.parts import FilePart, md5_hex
from tplr.storage.retry import with_retry
from tplr.storage.s3_multipart import S3Multipart
from tplr.testing.s3server import Delay, FlipBit, FlipSentBit, LoseResponse, Reset, Rules, Status, Truncate, serve

ACCOUNT = "0123456789abcdef0123456789abcdef"
KEY_ID = "c0ffee00" * 4
SECRET = "5ec2e75a" * 8
READ_KEY_ID = "deadbeef" * 4
READ_SECRET = "0badf00d" * 8
KEYS: dict[str, Any] = {
    KEY_ID: {"secret": SECRET, "buckets": {"bucket": "read-write", "private": "read-write"}},
    READ_KEY_ID: {"secret": READ_SECRET, "buckets": {"bucket": "read"}},
}
NO_RATE = Rules(one_write_per_second=False)


def bucket(**changes: str) -> Bucket:
    parts = {"name": "bucket", "account_id": ACCOUNT, "access_key_id": KEY_ID, "secret_access_key": SECRET}
    return Bucket(**{**parts, **changes})  # pyright: ignore[reportArgumentType]


READER = bucket(access_key_id=READ_KEY_ID, secret_access_key=READ_SECRET)


def test_wrong_endpoint_region_and_tls_settings_are_told_at_once() -> None:
    wrong = {"TPLR_S3_ENDPOINT": "x", "TPLR_S3_REGION": "no region"}
    wrong |= {"AWS_CA_BUNDLE": "/nofile", "HTTPS_PROXY": "foo://host"}
    for region, names in ((None, sorted(wrong)), ("auto", sorted(wrong.keys() - {"TPLR_S3_REGION"}))):
        with pytest.raises(ConfigError) as error:
            S3Connections.of(Environment(wrong), region=region)
        assert sorted(re.split("[ :]", problem)[0] for problem in error.value.problems) == names


@pytest.mark.parametrize(
    ("jurisdiction", "url"),
    [
        ("default", f"https://{ACCOUNT}.r2.cloudflarestorage.com"),
        ("eu", f"https://{ACCOUNT}.eu.r2.cloudflarestorage.com"),
        ("fedramp", f"https://{ACCOUNT}.fedramp.r2.cloudflarestorage.com"),
    ],
)
def test_the_endpoint_is_the_account_s(jurisdiction: str, url: str) -> None:
    assert endpoint_url(bucket(jurisdiction=jurisdiction)) == url
    assert endpoint_url(bucket(jurisdiction=jurisdiction), "http://127.0.0.1:9000") == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    "account_id",
    [
        "127.0.0.1:15098/aaaaaaaaaaaaaaaa",
        "evil.example#aaaaaaaaaaaaaaaaaaa",
        "evil.example?aaaaaaaaaaaaaaaaaaa",
        "user@evil.example/aaaaaaaaaaaaaa",
        ACCOUNT.upper(),
        ACCOUNT + "\n",
        ACCOUNT[:-1] + "٣",
        "",
    ],
)
def test_hostile_account_ids_never_become_hosts(account_id: str) -> None:
    with pytest.raises(ValueError, match="account_id"):
        endpoint_url(bucket(account_id=account_id))


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:9000",
        "ftp://host",
        "http://",
        "http://u:p@host",
        "http://host/path",
        "http://host?x",
        "http://host:65536",
        "http://h\n",
    ],
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"host\[:port\]"):
        S3Connections(endpoint)


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_are_what_r2_understands(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nDate: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: ")
        writer.write(hashlib.md5(b"x" * 2**21, usedforsecurity=False).hexdigest().encode() + b"\r\n\r\n")

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    info = await store.put("a key", b"x" * 2**21, metadata={"sha256": "ab"}, create_only=True)
    assert info.last_modified == 1445412480
    (head,) = server.heads
    request, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert request == "PUT /bucket/a%20key HTTP/1.1"
    assert "expect" not in headers
    assert "transfer-encoding" not in headers
    assert not [name for name in headers if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer"))]
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["content-md5"] == "Z7L4FqMOiVYUmy1760eeUQ=="  # md5 of 2 MiB of "x"
    assert headers["content-length"] == str(2**21)
    assert headers["if-none-match"] == "*"
    assert headers["x-amz-meta-sha256"] == "ab"
    assert "/auto/s3/aws4_request" in headers["authorization"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_part_does_not_wait_for_100_continue(raw_server, connect, tmp_path: Path) -> None:
    body = b"x" * 2**21

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: " + md5_hex(body).encode() + b"\r\n\r\n")

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    (tmp_path / "file").write_bytes(b"before" + body + b"after")
    await store.multipart.put_part("k", "id", FilePart(1, 6, 6 + len(body)), tmp_path / "file")
    await store.multipart.put_part("k", "id", FilePart(1, 6, 6 + len(body)), tmp_path / "file", "ab" * 32)
    for head, payload in zip(server.heads, ("unsigned-payload", "ab" * 32), strict=True):
        assert "expect:" not in head.lower()
        assert f"x-amz-content-sha256: {payload}" in head.lower()
        assert "x-amz-content-sha256" in head.partition("SignedHeaders=")[2].partition(",")[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_connection_is_used_again(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        status = b"404 Not Found" if "missing" in server.heads[-1] else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b'\r\nContent-Length: 3\r\nETag: "e"\r\n')
        writer.write(b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n")
        writer.write(b"abc" if server.heads[-1].startswith("GET") else b"")

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    for _ in range(3):
        await store.head("k")
        await store.get("k", max_bytes=3)
        for call in (store.head("missing"), store.get("missing", max_bytes=3)):
            with pytest.raises(ObjectNotFound):
                await call
    assert (len(server.heads), server.connections) == (12, 1)


async def test_the_machine_s_aws_settings_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_PROFILE": "missing",
        "AWS_CONFIG_FILE": str(tmp_path / "missing"),
        "AWS_DEFAULT_REGION": "us-gov-west-1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "other",
        "AWS_SECRET_ACCESS_KEY": "other",
        "AWS_SESSION_TOKEN": "other",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_supported",
        "AWS_MAX_ATTEMPTS": "9",
    }.items():
        monkeypatch.setenv(name, value)
    async with serve(tmp_path / "server", KEYS, port=0) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        await store.put("k", b"x")
        assert await store.get("k", max_bytes=1) == b"x"


@pytest.mark.asyncio(loop_scope="module")
async def test_credentials_share_connections_and_not_signatures(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "e"\r\n')
        writer.write(b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n")

    server = await raw_server(answer)
    store = await connect(server.endpoint)
    for one in (bucket(), READER, bucket()):
        await S3Store(replace(store.client, bucket=one)).head("k")
    used = [re.search("Credential=([0-9a-f]+)/", head) for head in server.heads]
    assert [match and match[1] for match in used] == [KEY_ID, READ_KEY_ID, KEY_ID]
    assert server.connections == 1


async def test_a_closed_connection_is_named() -> None:
    connections = S3Connections("http://127.0.0.1:9")
    store = connections.store(bucket())
    with pytest.raises(StoreError, match="closed"):
        await store.head("k")
    async with connections:
        pass
    with pytest.raises(StoreError, match="closed"):
        await store.head("k")


async def test_a_read_key_reads_and_no_more(tmp_path: Path) -> None:
    async with serve(tmp_path, KEYS, port=0) as server, S3Connections(server.endpoint) as connections:
        await connections.store(bucket()).put("k", b"x")
        reader = connections.store(READER)
        assert await reader.get("k", max_bytes=1) == b"x"
        assert [info.key for info in await reader.list()] == ["k"]
        with pytest.raises(AccessDenied):
            await reader.put("k", b"y")
        with pytest.raises(AccessDenied):
            await reader.delete("k")
        strangers = [
            replace(READER, name="private"),
            replace(READER, access_key_id="0" * 32),
            replace(READER, secret_access_key="0" * 64),
        ]
        for stranger in strangers:
            with pytest.raises(AccessDenied):
                await connections.store(stranger).head("k")
            with pytest.raises(AccessDenied):
                await connections.store(stranger).get("k", max_bytes=1)


async def test_a_missing_bucket_is_said_so(moto_endpoint: str) -> None:
    async with S3Connections(moto_endpoint) as connections:
        store = connections.store(bucket(name="never-created"))
        for call in (store.get("k", max_bytes=1), store.put("k", b"x"), store.list()):
            with pytest.raises(ObjectNotFound, match="no such bucket"):
                await call
        with pytest.raises(ObjectNotFound):
            await store.head("k")


async def test_long_listings_come_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_PAGE", 10)
    async with serve(tmp_path, KEYS, port=0, rules=NO_RATE) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        names = [f"n{n:04}" for n in range(33)]
        await asyncio.gather(*(store.put(name, b"") for name in names))
        assert [info.key for info in await store.list("n")] == names
        assert [info.key for info in await store.list("n", limit=31)] == names[:31]
        assert [info.key for info in await store.list("n", start_after="n0001", limit=1000)] == names[2:1002]


@pytest.mark.parametrize(
    "fault", [Status(503), Status(429, "TooManyRequests"), Reset(), Truncate(100), Truncate(100, reset=True), Delay(9)]
)
async def test_passing_faults_are_survived_by_retry(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_errors, "_THROTTLED_SECONDS", 0.05)
    limits = TransferLimits(call_seconds=0.4)
    body = bytes(5000)
    async with (
        serve(tmp_path, KEYS, port=0) as server,
        S3Connections(server.endpoint, limits=limits) as connections,
    ):
        store = connections.store(bucket())
        await with_retry(lambda: store.put("k", body), deadline_seconds=30, base_seconds=0.01)
        server.faults.add("^GET", fault, times=1 if fault == Status(429, "TooManyRequests") else 2)
        got = await with_retry(lambda: store.get("k", max_bytes=5000), deadline_seconds=30, base_seconds=0.01)
        assert got == body


@pytest.mark.parametrize("after", [0, 1, 100])
async def test_a_listing_that_is_cut_is_not_an_empty_bucket(tmp_path: Path, after: int) -> None:
    """``http.client`` reports no error if the connection is closed before the announced length."""
    async with serve(tmp_path, KEYS, port=0) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        await store.put("k", b"1")
        multipart = S3Multipart(store.client)
        await multipart.create("begun")
        for call in (store.list, multipart.unfinished):
            server.faults.add(r"^GET /bucket\?", Truncate(after))
            with pytest.raises(StoreUnavailable):
                await call()
            assert len(await call()) == 1


async def test_a_throttled_put_waits_its_second(tmp_path: Path) -> None:
    async with serve(tmp_path, KEYS, port=0) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        await store.put("k", b"1")
        with pytest.raises(StoreUnavailable) as caught:
            await store.put("k", b"2")
        assert caught.value.retry_after == 1.0
        await with_retry(lambda: store.put("k", b"3"), deadline_seconds=20, base_seconds=0.01)
        assert await store.get("k", max_bytes=1) == b"3"


async def test_a_create_whose_answer_got_lost_meets_itself(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, KEYS, port=0, rules=NO_RATE) as server,
        S3Connections(server.endpoint) as connections,
    ):
        store = connections.store(bucket())
        server.faults.add("^PUT", LoseResponse())
        with pytest.raises(PreconditionFailed):
            await with_retry(lambda: store.put("k", b"mine", create_only=True), deadline_seconds=20, base_seconds=0.01)
        assert (await store.head("k")).etag == hashlib.md5(b"mine", usedforsecurity=False).hexdigest()


async def test_a_lost_answer_to_a_put_is_repeated_whole(tmp_path: Path) -> None:
    body = bytes(range(256)) * 5000
    async with (
        serve(tmp_path / "server", KEYS, port=0, rules=NO_RATE) as server,
        S3Connections(server.endpoint) as connections,
    ):
        store = connections.store(bucket())
        source = tmp_path / "source"
        await asyncio.to_thread(source.write_bytes, body)
        for send in (lambda: store.put("k", body), lambda: store.put_file("k", source)):
            server.faults.add("^PUT", LoseResponse(), times=3)
            await with_retry(send, deadline_seconds=30, base_seconds=0.01)
            assert await store.get("k", max_bytes=len(body)) == body
            await store.delete("k")


async def test_a_body_is_in_memory_once(tmp_path: Path) -> None:
    async with serve(tmp_path, KEYS) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        body = bytes(range(256)) * 2**15
        await store.put("k", body)
        tracemalloc.start()
        try:
            received = await store.get("k", max_bytes=len(body))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert received == body
    assert peak < 1.25 * len(body)


async def test_what_broken_off_downloads_had_received_is_freed_with_their_errors(tmp_path: Path) -> None:
    """Not only at the next garbage collection, because a bad network would fill the memory until then."""
    async with serve(tmp_path, KEYS) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        body = bytes(range(256)) * 2**15
        await store.put("k", body)
        server.faults.add("^GET", Truncate(len(body) - 1), times=None)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(4):
                with contextlib.suppress(StoreUnavailable):
                    await store.get("k", max_bytes=len(body))
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
    assert held < 1.5 * len(body)


async def test_a_whole_object_is_checked_by_its_etag(tmp_path: Path) -> None:
    async with serve(tmp_path, KEYS, port=0) as server, S3Connections(server.endpoint) as connections:
        store = connections.store(bucket())
        await store.put("k", b"abc")
        server.faults.add("^GET", FlipBit(1), times=4)
        with pytest.raises(StoreUnavailable, match="arrived damaged"):
            await store.get("k", max_bytes=3)
        assert await store.get("k", max_bytes=3, verify=False) == b"acc"
        # The ETag does not verify a range.
        assert await store.get("k", max_bytes=3, byte_range=(0, 3)) == b"acc"
        assert await with_retry(lambda: store.get("k", max_bytes=3), deadline_seconds=9, base_seconds=0.01) == b"abc"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_etag_that_is_no_md5_is_not_compared(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nETag: " + md5_hex(b"x").encode() + b"-2\r\n")
        writer.write(b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\nabc")

    store = await connect((await raw_server(answer)).endpoint)
    assert await store.get("k", max_bytes=3) == b"abc"


async def test_a_bit_that_flips_on_the_way_up_is_found_and_sent_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    await asyncio.to_thread(source.write_bytes, b"abc")
    async with (
        serve(tmp_path / "server", KEYS, port=0, rules=NO_RATE) as server,
        S3Connections(server.endpoint) as connections,
    ):
        store = connections.store(bucket())
        for refused, send in (
            (True, lambda: store.put("k", b"abc")),
            (False, lambda: store.put_file("k", source)),
            (True, lambda: store.put_file("k2", source, create_only=True)),
        ):
            await store.put("k", b"before")
            server.faults.add("^PUT", FlipSentBit(1))
            with pytest.raises(StoreUnavailable, match="arrived damaged") as caught:
                await send()
            assert ("400 BadDigest" in str(caught.value)) is refused
            assert (await store.get("k", max_bytes=6) == b"before") is refused
            server.faults.add("^PUT", FlipSentBit(1), times=2)
            await with_retry(send, deadline_seconds=30, base_seconds=0.01)
        assert await store.get("k2", max_bytes=3) == b"abc"
        await store.put_file("k", source)
        assert await store.get("k", max_bytes=3) == b"abc"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_ignores_content_md5_gives_itself_away(raw_server, connect) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nDate: Wed, 21 Oct 2015 07:28:00 GMT\r\n")
        writer.write(b'ETag: "0123456789abcdef0123456789abcdef"\r\n\r\n')

    store = await connect((await raw_server(answer)).endpoint)
    with pytest.raises(StoreUnavailable, match="the body arrived damaged"):
        await store.put("k", b"abc")


async def test_a_wrong_clock_is_nobody_s_fault(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, KEYS, port=0, clock=lambda: 4e9) as server,
        S3Connections(server.endpoint) as connections,
    ):
        store = connections.store(bucket())
        # The answer to a HEAD has no body with a reason.
        for call in (store.list(), store.get("k", max_bytes=1), store.head("k")):
            with pytest.raises(StoreUnavailable, match="clock"):
                await call


async def test_secrets_are_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = bucket(secret_access_key="bad5ec2e" * 8)
    shown: list[str] = []
    async with serve(tmp_path, KEYS, port=0) as server, S3Connections(server.endpoint) as connections:
        good = connections.store(bucket())
        await good.put("k", b"x")
        server.faults.add("broken", Reset(), times=None)
        denied = connections.store(wrong)
        for call in (good.head("missing"), good.get("broken", max_bytes=1), denied.put("k", b"x"), denied.head("k")):
            with pytest.raises(StoreError) as caught:
                await call
            shown += [str(caught.value), repr(caught.value)]
            assert SECRET not in "".join(traceback.format_exception(caught.value))
        shown += [repr(good), repr(denied), repr(connections), str(connections)]
    ours = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    for text in shown + ours:
        assert KEY_ID not in text
    for secret in (SECRET, wrong.secret_access_key):
        assert secret not in caplog.text
        assert not any(secret in text for text in shown)


async def test_nothing_stays_open(tmp_path: Path) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with serve(tmp_path / "server", KEYS, port=0, rules=NO_RATE) as server:
            async with S3Connections(server.endpoint, limits=TransferLimits(call_seconds=0.3)) as connections:
                store = connections.store(bucket())
                body = bytes(2**21)
                await store.put("k", body)
                await store.get("k", max_bytes=len(body))
                await store.get_file("k", tmp_path / "file", max_bytes=len(body))
                await store.put_file("k2", tmp_path / "file")
                server.faults.add("late", Delay(0.3), times=None)
                server.faults.add("^GET.*cut", Truncate(9), times=None)
                await store.put("cut", body)
                for call in (
                    store.get("k", max_bytes=5),
                    store.get("missing", max_bytes=5),
                    store.get("late", max_bytes=5),
                    store.get("cut", max_bytes=len(body)),
                    store.get_file("late", tmp_path / "other", max_bytes=5),
                ):
                    with pytest.raises(StoreError):
                        await call
            del connections, store
            gc.collect()
        await asyncio.sleep(0.05)
        gc.collect()
    assert complaints == []
    assert [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)] == []
