"""HTTP/1.1 for S3: one thread for each request, connections that are kept open. The only file that opens a connection.

A body never passes through the event loop. The thread that receives a piece also writes and hashes it, while the piece
is still in the processor's cache, and holds no lock meanwhile. A thread can't be cancelled, but its socket can be shut
down from another thread, and that ends it at once.
"""

import asyncio
import base64
import contextlib
import http.client
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi

from tplr.errors import StoreError
from tplr.storage.progress import Progress
from tplr.storage.s3_body import Body

CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 10.0  # seconds without a byte
# Servers close idle connections, and a request on a closed one fails late.
IDLE_TIMEOUT = 10.0
# Seconds between two looks at a running request's deadline.
POLL_INTERVAL = 0.2
# Progress is counted in pieces of this size.
PIECE_BYTES = 2**18
# A sink gets blocks of this size: writing one to a file costs less than writing four pieces.
BLOCK_BYTES = 2**20
# Requests at a time in one process; their threads mostly wait.
MAX_THREADS = 64

# A server may close a kept connection just when a request is sent on it. These methods may be sent twice.
_IDEMPOTENT = ("GET", "HEAD", "DELETE")

HTTPException = http.client.HTTPException
HTTPResponse = http.client.HTTPResponse


class DeadlineExceeded(TimeoutError):
    """The request took too long, or its body came too slowly."""


@dataclass(frozen=True)
class Deadline:
    """When a request is given up. Times are ``time.monotonic`` seconds.

    Attributes:
        response_by: the response's headers must have come.
        end_by: the whole body must have come.
        grace_seconds, floor: a body must have come at ``floor`` bytes per second, ``grace_seconds`` aside.
    """

    response_by: float
    end_by: float
    grace_seconds: float
    floor: float


class Receiver(Protocol):
    """What a request does with its response. The request's thread calls both methods; what they raise ends it."""

    def begin(self, response: HTTPResponse) -> memoryview | int:
        """Judge the status and the headers. Returns the memory that the body fills, or how many bytes of it to take."""
        ...

    def take(self, piece: memoryview) -> object:
        """Called with the body's bytes in order, as they come. The next call may reuse the memory of ``piece``."""
        ...


class HttpRequest:
    """One request to one server.

    Args:
        target: path and query.
        body: read again from its start if the request is sent twice.
        progress: called every ``POLL_INTERVAL`` with the bytes sent, then with the bytes received.
    """

    def __init__(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        receiver: Receiver,
        deadline: Deadline,
        body: Body | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._method = method
        self._target = target
        self._headers = dict(headers)
        self._receiver = receiver
        self._deadline = deadline
        self._body = body
        self._progress = progress
        self._body_began: float | None = None
        self._sent = 0
        self._received = 0
        self._size = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended = False

    async def run(self, pool: "ConnectionPool", threads: ThreadPoolExecutor) -> None:
        """Send the request in one of ``threads`` and receive its response. The thread has ended when this returns.

        Raises:
            DeadlineExceeded: see ``Deadline``.
            OSError, HTTPException: the connection failed.
        """
        future = asyncio.get_running_loop().run_in_executor(threads, self._run, pool)
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
                # The exception's traceback holds this frame. Without the cycle, the buffers are freed with it.
                del future

    def _due(self) -> float:
        if self._body_began is None:
            return self._deadline.response_by
        by_floor = self._body_began + self._deadline.grace_seconds + self._received / self._deadline.floor
        return min(by_floor, self._deadline.end_by)

    def _report(self) -> None:
        done, total = (self._sent, self._body.size if self._body else 0)
        if self._body_began is not None:
            done, total = self._received, self._size
        if self._progress and total:
            self._progress(done, total)

    def _shut_down(self) -> bool:
        """End the thread at once; False if it still connects, and will then find that it has ended."""
        with self._lock:
            self._ended = True
            if self._socket is None:
                return False
            with contextlib.suppress(OSError):  # already closed
                # Not SSLSocket.shutdown, which would take encrypted bytes for plain text from then on.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return True

    def _run(self, pool: "ConnectionPool") -> None:
        connection, response = self._connect_and_send(pool)
        try:
            wanted = self._receiver.begin(response)
        except BaseException:
            if self._body is None:
                _release(pool, connection, response)
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
        _release(pool, connection, response)

    def _receive(self, response: HTTPResponse, wanted: memoryview | int) -> None:
        if isinstance(wanted, memoryview):
            for start in range(0, self._size, PIECE_BYTES):
                piece = wanted[start : start + PIECE_BYTES]
                self._fill(response, piece)
                self._receiver.take(piece)
            return
        block = memoryview(bytearray(min(wanted, BLOCK_BYTES)))
        while (before := self._received) < wanted:
            try:
                self._fill(response, block[: wanted - before])
            finally:  # what came before the connection broke counts
                self._receiver.take(block[: self._received - before])

    def _fill(self, response: HTTPResponse, memory: memoryview) -> None:
        while memory:
            count = response.readinto(memory[:PIECE_BYTES])
            if not count:
                raise http.client.IncompleteRead(b"")
            memory = memory[count:]
            self._received += count

    def _connect_and_send(self, pool: "ConnectionPool") -> tuple[http.client.HTTPConnection, HTTPResponse]:
        if (kept := pool.take()) is not None:
            try:
                return kept, self._send(kept)
            except ConnectionError:
                with self._lock:
                    if self._ended or self._method not in _IDEMPOTENT:
                        raise
                    self._socket = None
        connection = pool.connect()
        return connection, self._send(connection)

    def _send(self, connection: http.client.HTTPConnection) -> HTTPResponse:
        with self._lock:
            self._socket = connection.sock
            ended = self._ended
        try:
            if ended:
                raise ConnectionAbortedError("the request was given up")
            # A server that refuses a body may answer before it has read all of it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                body = self._pieces(self._body) if self._body else None
                connection.request(self._method, self._target, body, self._headers)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _pieces(self, body: Body) -> Iterator[memoryview]:
        for piece in body:
            yield piece
            self._sent += len(piece)


class ConnectionPool:
    """Connections to one server, kept open between requests. Thread-safe.

    Args:
        endpoint: ``http(s)://host[:port]``.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._closed = False

    def connect(self) -> http.client.HTTPConnection:
        """A new connection; with TLS through the environment's proxy, if any. Raises OSError, HTTPException."""
        url = urlsplit(self._endpoint)
        assert url.hostname
        if url.scheme == "http":
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=CONNECT_TIMEOUT)
        elif proxy := _proxy_for(url.hostname):
            there = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            connection = http.client.HTTPSConnection(
                there.hostname or "", there.port or 80, timeout=CONNECT_TIMEOUT, context=_tls()
            )
            connection.set_tunnel(url.hostname, url.port, _proxy_login(there.username, there.password))
        else:
            connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=CONNECT_TIMEOUT, context=_tls())
        connection.connect()
        connection.sock.settimeout(READ_TIMEOUT)
        return connection

    def take(self) -> http.client.HTTPConnection | None:
        """The connection that was used last, if it is recent and the server has neither closed it nor sent anything."""
        with contextlib.suppress(IndexError):
            used_at, connection = self._idle.pop()
            if time.monotonic() - used_at < IDLE_TIMEOUT and _is_silent(connection.sock):
                return connection
            connection.close()
            self.close_idle(IDLE_TIMEOUT)
        return None

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose last response was read to its end."""
        if connection.sock is not None:  # else the server announced that it closes it
            self._idle.append((time.monotonic(), connection))
        if self._closed:
            self.close_idle()

    def close(self) -> None:
        self._closed = True
        self.close_idle()

    def close_idle(self, seconds: float = 0.0) -> None:
        """Close the connections that have been idle for ``seconds``."""
        with contextlib.suppress(IndexError):  # none is left, or another thread took it
            while time.monotonic() - self._idle[0][0] >= seconds:
                self._idle.pop(0)[1].close()


class Transport:
    """The threads and connections of any number of servers; between ``open`` and ``close`` it sends requests."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._pools: dict[str, ConnectionPool] = {}
        self._tidied_at = 0.0

    def open(self) -> None:
        # Its own threads: requests that wait for a server take none from the default executor, which writes files.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="s3")

    async def close(self) -> None:
        if self._threads is None:
            return
        threads, self._threads = self._threads, None
        threads.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await asyncio.to_thread(threads.shutdown)

    async def send(self, endpoint: str, request: HttpRequest) -> None:
        """Run a request. Raises StoreError if the transport is not open, and as ``HttpRequest.run``."""
        if self._threads is None:
            raise StoreError("S3Connections is closed: use its stores inside its block")
        now = time.monotonic()
        if now - self._tidied_at >= IDLE_TIMEOUT:  # else a server that gets no more requests keeps its connections
            self._tidied_at = now
            for pool in self._pools.values():
                pool.close_idle(IDLE_TIMEOUT)
        await request.run(self._pools.setdefault(endpoint, ConnectionPool(endpoint)), self._threads)


async def _wait_for(future: asyncio.Future[None]) -> None:
    """Wait for a thread that is about to end; a cancellation meanwhile is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


def _release(pool: ConnectionPool, connection: http.client.HTTPConnection, response: HTTPResponse) -> None:
    """Keep the connection if the response was read to its end."""
    if response.isclosed():
        pool.give_back(connection)
    else:
        _drop(connection, response)


def _drop(connection: http.client.HTTPConnection, response: HTTPResponse) -> None:
    # After "Connection: close" the response alone owns the socket.
    response.close()
    connection.close()


def _is_silent(connected: socket.socket) -> bool:
    """Whether the server has neither closed the connection nor sent bytes that nobody asked for."""
    with selectors.DefaultSelector() as selector:
        selector.register(connected, selectors.EVENT_READ)
        return not selector.select(0)


def _proxy_for(host: str) -> str | None:
    return None if proxy_bypass(host) else getproxies().get("https")


def _proxy_login(name: str | None, password: str | None) -> dict[str, str]:
    if name is None:
        return {}
    login = base64.b64encode(f"{unquote(name)}:{unquote(password or '')}".encode()).decode()
    return {"Proxy-Authorization": f"Basic {login}"}


@cache
def _tls() -> ssl.SSLContext:
    """Trusts ``AWS_CA_BUNDLE``, or else certifi's authorities. One for the process: reading them takes 30 ms."""
    return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or certifi.where())
