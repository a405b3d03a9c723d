"""HTTP/1.1 for S3: one thread per request, and kept-alive connections. The only file that opens a connection.

A body never passes through the event loop. The thread that receives a piece also writes and hashes it, without holding
a lock, while the piece is still in the processor's cache. A thread can't be cancelled, but another thread can shut down
its socket, which ends it at once.
"""

import asyncio
import base64
import contextlib
import http.client
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Protocol, Self
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # pyright: ignore[reportAttributeAccessIssue] - not in typeshed

import certifi

from tplr.config import HttpsSettings
from tplr.errors import StoreError, StoreUnavailable
from tplr.storage.progress import Progress
from tplr.storage.s3_body import PIECE_BYTES, Body

CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 10.0  # seconds without a byte
# Servers close idle connections, and a request on a closed connection fails late.
IDLE_TIMEOUT = 10.0
# Seconds between two checks of a running request's deadline.
POLL_INTERVAL = 0.2
# Size of the blocks passed to a sink: writing one block to a file costs less than writing four pieces.
BLOCK_BYTES = 2**20
# Concurrent requests in one process. Their threads mostly wait, and one is started only if all others are busy. These
# are more than peers can occupy with buckets that do not answer: 128 of a gather, 64 each of ``active_peers`` and
# ``SyncProofs``, and one for each validator. Otherwise ballots and uploads would wait for them.
MAX_THREADS = 512

# A server may close a kept-alive connection just as a request is sent on it. These methods may be sent twice.
_IDEMPOTENT = ("GET", "HEAD", "DELETE")

HTTPException = http.client.HTTPException
HTTPResponse = http.client.HTTPResponse


class DeadlineExceeded(TimeoutError):
    """The request took too long, or its body came too slowly."""


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """Time limits of a request.

    Attributes:
        call_seconds: limit until the response; limit of a whole request without a body.
        grace_seconds: time after which a download must keep up with ``download_floor``.
        download_floor: minimum bytes per second, over the whole body so far.
        upload_floor: minimum bytes per second; an upload has ``call_seconds`` plus ``size / upload_floor``.
    """

    call_seconds: float = 30.0
    grace_seconds: float = 2.0
    download_floor: float = 2**20
    upload_floor: float = 2**17


class Receiver(Protocol):
    """Handles a request's response. The request's thread calls both methods; an error that they raise ends it."""

    def begin(self, response: HTTPResponse) -> memoryview | int:
        """Check status and headers. Return the memory for the body, or the number of its bytes to pass to ``take``."""
        ...

    def take(self, piece: memoryview) -> object:
        """Receive the body's bytes, in order as they arrive. The next call may reuse the memory of ``piece``."""
        ...


@dataclass(eq=False, repr=False)
class HttpRequest:
    """One request to one server.

    Args:
        pool: provides the thread and the connection.
        endpoint: ``http(s)://host[:port]``.
        target: path and query.
        body: read again from its start if the request is sent twice.
        progress: called every ``POLL_INTERVAL`` with the bytes sent, then with the bytes received.
    """

    method: str
    endpoint: str
    target: str
    headers: Mapping[str, str]
    _: KW_ONLY
    pool: "ConnectionPool"
    receiver: Receiver
    limits: TransferLimits
    body: Body | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._created = time.monotonic()
        self._body_began: float | None = None
        self._received = 0
        self._size = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended = False

    async def run(self) -> None:
        """Send the request in a thread of the pool and receive its response. When this returns, the thread has ended.

        Raises:
            StoreError: as ``ConnectionPool.submit``.
            DeadlineExceeded: the limits were exceeded.
            OSError, HTTPException: the connection failed.
        """
        try:
            future = asyncio.wrap_future(self.pool.submit(self._run))
        except StoreError:
            self._ended = True  # the work may be queued
            raise
        try:
            while not future.done():
                self._report()
                if (left := self._due() - time.monotonic()) <= 0:
                    raise DeadlineExceeded
                await asyncio.wait({future}, timeout=min(left, POLL_INTERVAL))
            future.result()
        finally:
            try:
                if not future.done() and self._shut_down():
                    await _wait_for(future)
            finally:  # also if it is cancelled a second time
                if not future.cancel():
                    future.exception()  # else asyncio logs that nobody retrieved it
                # The exception's traceback refers to this frame. Without this cycle, the buffers are freed at once.
                del future

    def _due(self) -> float:
        limits = self.limits
        if self._body_began is None:
            return self._created + limits.call_seconds + (self.body.size if self.body else 0) / limits.upload_floor
        return self._body_began + limits.grace_seconds + self._received / limits.download_floor

    def _report(self) -> None:
        if self.progress and self._size:
            self.progress(self._received, self._size)
        elif self.progress and self.body and self.body.size:
            self.progress(self.body.sent, self.body.size)

    def _shut_down(self) -> bool:
        """End the thread at once. Return False if it is still connecting; it then ends after that."""
        with self._lock:
            self._ended = True
            if self._socket is None:
                return False
            with contextlib.suppress(OSError):  # already closed
                # Not SSLSocket.shutdown, which would treat encrypted bytes as plain text from then on.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return True

    def _run(self) -> None:
        connection, response = self._connect_and_send()
        try:
            wanted = self.receiver.begin(response)
        except BaseException:
            if self.body is None:
                self._release(connection, response)
            else:  # the server may have refused the body before reading all of it
                _drop(connection, response)
            raise
        try:
            self._size = len(wanted) if isinstance(wanted, memoryview) else wanted
            self._body_began = time.monotonic()
            self._receive(response, wanted)
            if response.length == 0:
                response.read()  # of no bytes: marks the response as read to its end
        except BaseException:
            _drop(connection, response)
            raise
        self._release(connection, response)

    def _release(self, connection: http.client.HTTPConnection, response: HTTPResponse) -> None:
        """Keep the connection if the response was read to its end and the server does not close it."""
        if response.isclosed() and connection.sock is not None:
            self.pool.give_back(self.endpoint, connection)
        else:
            _drop(connection, response)

    def _receive(self, response: HTTPResponse, wanted: memoryview | int) -> None:
        if isinstance(wanted, memoryview):
            for start in range(0, self._size, PIECE_BYTES):
                piece = wanted[start : start + PIECE_BYTES]
                self._fill(response, piece)
                self.receiver.take(piece)
            return
        block = memoryview(bytearray(min(wanted, BLOCK_BYTES)))
        while (before := self._received) < wanted:
            try:
                self._fill(response, block[: wanted - before])
            finally:  # bytes received before the connection broke count
                self.receiver.take(block[: self._received - before])

    def _fill(self, response: HTTPResponse, memory: memoryview) -> None:
        while memory:
            count = response.readinto(memory[:PIECE_BYTES])
            if not count:
                raise http.client.IncompleteRead(b"")
            memory = memory[count:]
            self._received += count

    def _connect_and_send(self) -> tuple[http.client.HTTPConnection, HTTPResponse]:
        if self._ended:
            raise ConnectionAbortedError("the request was cancelled")
        if (kept := self.pool.take(self.endpoint)) is not None:
            try:
                return kept, self._send(kept)
            except ConnectionError:
                with self._lock:
                    if self._ended or self.method not in _IDEMPOTENT:
                        raise
                    self._socket = None
        connection = _connect(self.endpoint, self.pool.https)
        return connection, self._send(connection)

    def _send(self, connection: http.client.HTTPConnection) -> HTTPResponse:
        with self._lock:
            self._socket = connection.sock
            ended = self._ended
        try:
            if ended:
                raise ConnectionAbortedError("the request was cancelled")
            # A server that refuses a body may answer before it has read all of it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(self.method, self.target, self.body, self.headers)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise


@dataclass(frozen=True)
class _Idle:
    """A connection that no request uses, and the time by ``time.monotonic`` since when."""

    since: float
    endpoint: str
    connection: http.client.HTTPConnection


class ConnectionPool:
    """Threads for requests, and kept-alive connections to any number of servers.

    Requests can be sent within its ``async with`` block.

    Attributes:
        results: number of requests by result: "ok", or the error's name. The code that reports them may reset it.
    """

    def __init__(self, https: HttpsSettings) -> None:
        self.https = https
        self.results: Counter[str] = Counter()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []  # the connection that is idle longest comes first

    async def __aenter__(self) -> Self:
        # Separate threads, so that waiting requests do not occupy the default executor, which writes files.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="s3")
        return self

    async def __aexit__(self, *_: object) -> None:
        threads, self._threads = self._threads, None
        if threads:
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        self._close_idle(0.0)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Start a request's work in a thread.

        Raises:
            StoreUnavailable: the system allows no more threads. The work may still be called later.
            StoreError: the pool is not open.
        """
        if self._threads is None:
            raise StoreError("S3Connections is closed: use its stores inside its block")
        self._close_idle(IDLE_TIMEOUT)
        try:
            return self._threads.submit(work)
        except RuntimeError as error:
            raise StoreUnavailable("this process may have no more threads: raise its limit") from error

    def take(self, endpoint: str) -> http.client.HTTPConnection | None:
        """Return the server's most recently used connection, or None if it was closed or received bytes since."""
        with self._lock:
            found = next((one for one in reversed(self._idle) if one.endpoint == endpoint), None)
            if found is None:
                return None
            self._idle.remove(found)
        if time.monotonic() - found.since < IDLE_TIMEOUT and _is_silent(found.connection.sock):
            return found.connection
        found.connection.close()
        return None

    def give_back(self, endpoint: str, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for reuse; its last response must have been read to the end."""
        with self._lock:
            self._idle.append(_Idle(time.monotonic(), endpoint, connection))

    def _close_idle(self, seconds: float) -> None:
        with self._lock:
            while self._idle and time.monotonic() - self._idle[0].since >= seconds:
                self._idle.pop(0).connection.close()


def _connect(endpoint: str, https: HttpsSettings) -> http.client.HTTPConnection:
    """Open a connection; with TLS through the proxy, if any. Raises OSError, HTTPException."""
    url = urlsplit(endpoint)
    assert url.hostname
    if url.scheme == "http":
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=CONNECT_TIMEOUT)
    elif https.proxy and not proxy_bypass_environment(url.hostname, {"no": https.no_proxy}):
        there = urlsplit(https.proxy)
        tls = _tls(https.ca_bundle)
        host, port = there.hostname or "", there.port or 80
        connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT, context=tls)
        connection.set_tunnel(url.hostname, url.port, _proxy_login(there.username, there.password))
    else:
        tls = _tls(https.ca_bundle)
        connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=CONNECT_TIMEOUT, context=tls)
    connection.connect()
    connection.sock.settimeout(READ_TIMEOUT)
    return connection


async def _wait_for(future: asyncio.Future[None]) -> None:
    """Wait for a thread that is about to end; raise a cancellation that arrives meanwhile afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


def _drop(connection: http.client.HTTPConnection, response: HTTPResponse) -> None:
    # After "Connection: close" only the response owns the socket.
    response.close()
    connection.close()


def _is_silent(connected: socket.socket) -> bool:
    """Return whether the server has neither closed the connection nor sent unrequested bytes."""
    with selectors.DefaultSelector() as selector:
        selector.register(connected, selectors.EVENT_READ)
        return not selector.select(0)


def _proxy_login(name: str | None, password: str | None) -> dict[str, str]:
    if name is None:
        return {}
    login = base64.b64encode(f"{unquote(name)}:{unquote(password or '')}".encode()).decode()
    return {"Proxy-Authorization": f"Basic {login}"}


@cache
def _tls(ca_bundle: str) -> ssl.SSLContext:
    """Return a context that trusts ``ca_bundle``, or else certifi's authorities. Cached: reading them takes 30 ms."""
    return ssl.create_default_context(cafile=ca_bundle or certifi.where())
