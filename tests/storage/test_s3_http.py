"""Requests in threads: TLS, proxies, kept connections, refusals half-way, and cancellation."""

import asyncio
import contextlib
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tplr.errors import AccessDenied, StoreUnavailable
from tplr.schemas import Bucket
from tplr.storage import S3Connections, S3Store, TransferLimits, s3_http
from tplr.testing.s3server import serve

BODY = bytes(range(256)) * 3000
HEAD = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nContent-Length: %d\r\n\r\n'
BUCKET = Bucket(name="bucket", account_id="a" * 32, access_key_id="0" * 32, secret_access_key="1" * 64)


@contextlib.asynccontextmanager
async def listening(serve, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port at which ``serve(reader, writer)`` has every connection."""

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            await serve(reader, writer)

    server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def store_at(endpoint: str, limits: TransferLimits | None = None) -> AsyncIterator[S3Store]:
    async with S3Connections(endpoint, limits=limits) as connections:
        yield connections.store(BUCKET)


async def give_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD % len(BODY) + BODY)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of "localhost", with its key."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(path)]
    made = subprocess.run(["openssl", "req", "-x509", *key, *subject], check=True, capture_output=True, text=True)
    path.write_text(path.read_text() + made.stdout)
    return path


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))


async def test_over_tls(server_tls: ssl.SSLContext, trusted: None) -> None:
    async with listening(give_body, tls=server_tls) as port, store_at(f"https://localhost:{port}") as store:
        for _ in range(2):
            assert await store.get("k", max_bytes=len(BODY)) == BODY
            assert (await store.head("k")).size == len(BODY)


async def test_who_can_not_be_trusted_is_not_talked_to(server_tls: ssl.SSLContext) -> None:
    async with listening(give_body, tls=server_tls) as port, store_at(f"https://localhost:{port}") as store:
        with pytest.raises(StoreUnavailable, match="SSLCertVerificationError"):
            await store.get("k", max_bytes=len(BODY))


@pytest.mark.parametrize(
    ("before", "login"),
    [("http://", []), ("", []), ("http://me:p%40ss@", [b"Proxy-Authorization: Basic bWU6cEBzcw=="])],
    ids=["plain", "without a scheme", "with a password"],
)
async def test_through_the_environment_s_proxy(
    server_tls: ssl.SSLContext, trusted: None, monkeypatch: pytest.MonkeyPatch, before: str, login: list[bytes]
) -> None:
    asked: list[list[bytes]] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n"))
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(2**16):
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with listening(give_body, tls=server_tls) as port, listening(proxy) as proxy_port:
        monkeypatch.setenv("HTTPS_PROXY", f"{before}127.0.0.1:{proxy_port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with store_at(f"https://localhost:{port}") as store:
            assert await store.get("k", max_bytes=len(BODY)) == BODY
    assert asked == [[b"CONNECT localhost:%d HTTP/1.0" % port, *login]]


async def test_there_is_no_proxy_on_the_way_to_a_server_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    keys = {"0" * 32: {"secret": "1" * 64, "buckets": {"bucket": "read-write"}}}
    async with serve(tmp_path, keys) as server, store_at(server.endpoint) as store:
        await store.put("k", b"x")
        assert [info.key for info in await store.list()] == ["k"]


async def test_a_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD % 1 + b"x")
        await writer.drain()

    async with listening(once) as port, store_at(f"http://127.0.0.1:{port}") as store:
        for _ in range(3):
            assert await store.get("k", max_bytes=1) == b"x"
            await asyncio.sleep(0.02)
    assert connections == 3


@pytest.mark.parametrize(("method", "sent"), [("HEAD", 2), ("DELETE", 2), ("PUT", 1), ("POST", 1)])
async def test_only_idempotent_requests_are_sent_again_when_a_kept_connection_breaks(method: str, sent: int) -> None:
    heads: list[str] = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(HEAD % 0)
        await writer.drain()
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())

    async with listening(answer_once) as port, store_at(f"http://127.0.0.1:{port}") as store:
        await store.head("first")
        calls = {
            "HEAD": store.head,
            "DELETE": store.delete,
            "PUT": lambda key: store.put(key, b""),
            "POST": store.multipart.create,
        }
        with contextlib.suppress(StoreUnavailable):
            await calls[method]("k")
    assert len([head for head in heads if head.startswith(f"{method} /bucket/k")]) == sent


async def test_connections_to_who_is_never_asked_again_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_http, "IDLE_TIMEOUT", 0.05)
    left = asyncio.Event()

    async def give_and_watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await give_once(reader, writer)
        await reader.read()
        left.set()

    async def give_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD % 0)

    async with listening(give_and_watch) as port, listening(give_once) as other_port, S3Connections() as connections:
        monkeypatch.setattr(connections, "endpoint", f"http://127.0.0.1:{port}")
        await connections.store(BUCKET).head("k")
        monkeypatch.setattr(connections, "endpoint", f"http://127.0.0.1:{other_port}")
        await asyncio.sleep(0.1)
        assert not left.is_set()
        await connections.store(BUCKET).head("k")
        await asyncio.wait_for(left.wait(), 10)


async def test_a_refusal_comes_before_the_body_s_end() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)

    async with listening(refuse) as port, store_at(f"http://127.0.0.1:{port}") as store:
        with pytest.raises((AccessDenied, StoreUnavailable)):
            await store.put("k", bytes(2**24))


@pytest.mark.parametrize("method", ["get", "put"])
async def test_who_is_called_off_ends_at_once(method: str) -> None:
    reached, gone = asyncio.Event(), asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"" if method == "put" else HEAD % len(BODY) + BODY[:1000])
        reached.set()
        if method == "get":
            await reader.read()
            gone.set()
        else:
            await asyncio.sleep(0.3)
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**20):
                    pass
            gone.set()

    limits = TransferLimits(grace_seconds=60)
    async with listening(stall) as port, store_at(f"http://127.0.0.1:{port}", limits) as store:
        before = set(threading.enumerate())
        call = store.get("k", max_bytes=len(BODY)) if method == "get" else store.put("k", bytes(2**26))
        task = asyncio.create_task(call)
        await reached.wait()
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < s3_http.READ_TIMEOUT / 2
        await asyncio.wait_for(gone.wait(), 10)  # no connection is left
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("s3"):
            thread.join(5)
            assert not thread.is_alive()


async def test_a_process_that_may_have_no_more_threads_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of containers count threads. A request that was refused is not sent later."""
    heads: list[bytes] = []

    async def serve_bodies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(HEAD % 0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with listening(serve_bodies) as port, store_at(f"http://127.0.0.1:{port}") as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(StoreUnavailable, match="no more threads"):
                await store.head("first")
        await store.head("second")
        assert [head.split()[1] for head in heads] == [b"/bucket/second"]
