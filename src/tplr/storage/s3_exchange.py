"""One HTTP request and its answer, sent and received by a thread: no byte of a body passes through the event loop.

A thread that waits for the network, copies or hashes holds no lock that others need, and a piece that it has just
received is still in its core's cache when it is hashed. Nobody can cancel a thread, but its connection can be shut down
under it, from anywhere, and then it ends at once.
"""

import asyncio
import contextlib
import http.client
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import cache
from urllib.parse import urlsplit

from botocore.httpsession import ProxyConfiguration, get_cert_path
from botocore.utils import get_environ_proxies

from tplr.storage.base import Sink

CONNECT_SECONDS = 5.0
READ_TIMEOUT = 10.0
# Servers close connections that nobody uses, and who asks then learns it late.
IDLE_SECONDS = 10.0
# How often somebody looks how far the threads are.
POLL_INTERVAL = 0.2
# As often it is known how much has come.
PIECE_BYTES = 2**18
# So many at once are handed on: a file takes them for less than four pieces, and they are still in a cache.
BLOCK_BYTES = 2**20

Answer = http.client.HTTPResponse


class DeadlineExceeded(TimeoutError):
    """Given up, as it took too long."""


class Server:
    """Connections to one server, kept open between requests. Threads may use it at once.

    Args:
        endpoint: ``http(s)://host[:port]``.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._closed = False

    def connect(self) -> http.client.HTTPConnection:
        """A new one; with TLS through the environment's proxy, if there is one. Raises OSError, HTTPException."""
        url = urlsplit(self.endpoint)
        assert url.hostname
        if url.scheme == "http":
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=CONNECT_SECONDS)
        else:
            proxies = ProxyConfiguration(get_environ_proxies(self.endpoint))
            proxy_url = proxies.proxy_url_for(self.endpoint)
            proxy = urlsplit(proxy_url or "")
            there = (proxy.hostname, proxy.port or 80) if proxy.hostname else (url.hostname, url.port)
            connection = http.client.HTTPSConnection(*there, timeout=CONNECT_SECONDS, context=_tls())
            if proxy.hostname:
                connection.set_tunnel(url.hostname, url.port, proxies.proxy_headers_for(proxy_url))
        connection.connect()
        connection.sock.settimeout(READ_TIMEOUT)
        return connection

    def take(self) -> http.client.HTTPConnection | None:
        """The connection that was used last, if that was not long ago and nothing has come since."""
        with contextlib.suppress(IndexError):
            used_at, connection = self._idle.pop()
            if time.monotonic() - used_at < IDLE_SECONDS and _is_silent(connection.sock):
                return connection
            connection.close()
            self.close_idle(IDLE_SECONDS)
        return None

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """For the next request; only after an answer that was read to its end."""
        if connection.sock is not None:  # else the server announced that it closes it
            self._idle.append((time.monotonic(), connection))
        if self._closed:
            self.close_idle()

    def close(self) -> None:
        self._closed = True
        self.close_idle()

    def close_idle(self, seconds: float = 0.0) -> None:
        """Close the connections that were not used for so long."""
        with contextlib.suppress(IndexError):  # none is left, or another thread took it
            while time.monotonic() - self._idle[0][0] >= seconds:
                self._idle.pop(0)[1].close()


class HttpRequest:
    """One request to one server.

    Args:
        body: what it sends, if anything; its length is among the headers.
        judge: reads the status and the headers; returns how many bytes of the body are wanted, and who takes them or
            the memory where they belong, or raises.

    Attributes:
        began: since when the body comes, in ``time.monotonic`` seconds; None before.
        received: bytes of it that came.
        sent: bytes of the request's body that went.
    """

    def __init__(
        self,
        server: Server,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        judge: Callable[[Answer], tuple[int, Sink | memoryview]],
        body: Iterable[memoryview] | None = None,
    ) -> None:
        self.began: float | None = None
        self.received = 0
        self.sent = 0
        self._server = server
        self._body = body
        self._request = (method, path, body and self._sending(body), dict(headers))
        self._judge = judge
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended = False

    def _sending(self, body: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in body:
            yield piece
            self.sent += len(piece)

    async def run(self, executor: Executor, due: Callable[[], float]) -> None:
        """Run in a thread of ``executor``, which has ended when this ends.

        Args:
            due: when to give up, in ``time.monotonic`` seconds; asked again and again.

        Raises:
            DeadlineExceeded: given up. And OSError, HTTPException, and what ``judge`` and ``sink`` raise.
        """
        future = asyncio.get_running_loop().run_in_executor(executor, self._run)
        try:
            while not future.done():
                if (left := due() - time.monotonic()) <= 0:
                    raise DeadlineExceeded
                await asyncio.wait({future}, timeout=min(left, POLL_INTERVAL))
            future.result()
        finally:
            try:
                if not future.done() and self._end():
                    await _done(future)
            finally:  # also if this is cancelled once more meanwhile
                if not future.cancel():
                    future.exception()  # else asyncio complains that nobody has looked
                # Its error holds this frame: without the circle, what had been received is freed with the error.
                del future

    def _end(self) -> bool:
        """Make the thread end at once; False if it only connects, and will then find that nobody waits."""
        with self._lock:
            self._ended = True
            if self._socket is None:
                return False
            with contextlib.suppress(OSError):  # it ended by itself
                # Not TLS's own, which would take what comes for plain text from then on.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return True

    def _run(self) -> None:
        connection, answer = self._ask()
        try:
            size, target = self._judge(answer)
        except BaseException:
            if self._body is None:
                self._leave(connection, answer)
            else:  # who refuses a body may not have read it all
                _drop(connection, answer)
            raise
        try:
            self.began = time.monotonic()
            self._receive(answer, size, target)
            if answer.length == 0:
                answer.read()  # nothing, but then it is done with the connection
        except BaseException:
            _drop(connection, answer)
            raise
        self._leave(connection, answer)

    def _leave(self, connection: http.client.HTTPConnection, answer: Answer) -> None:
        """To the next request, if the answer was read to its end."""
        if answer.isclosed():
            self._server.give_back(connection)
        else:
            _drop(connection, answer)

    def _receive(self, answer: Answer, size: int, target: Sink | memoryview) -> None:
        """Have the body where it belongs."""
        if isinstance(target, memoryview):
            self._fill(answer, target)
            return
        block = memoryview(bytearray(min(size, BLOCK_BYTES)))
        while (before := self.received) < size:
            try:
                self._fill(answer, block[: size - before])
            finally:  # what came before it broke off has come
                target(block[: self.received - before])

    def _fill(self, answer: Answer, memory: memoryview) -> None:
        while memory:
            count = answer.readinto(memory[:PIECE_BYTES])
            if not count:
                raise http.client.IncompleteRead(b"")
            memory = memory[count:]
            self.received += count

    def _ask(self) -> tuple[http.client.HTTPConnection, Answer]:
        kept = self._server.take()
        if kept is not None:
            try:
                return kept, self._ask_over(kept)
            except ConnectionError:
                # Closed by the server, perhaps just when it was wanted: no fault of anybody's. But what was written may
                # be there, and must not be written anew without a look.
                with self._lock:
                    if self._ended or self._body is not None:
                        raise
                    self._socket = None
        connection = self._server.connect()
        return connection, self._ask_over(connection)

    def _ask_over(self, connection: http.client.HTTPConnection) -> Answer:
        with self._lock:
            self._socket = connection.sock
            ended = self._ended
        try:
            if ended:
                raise ConnectionAbortedError("nobody waits any more")
            # A server that refuses does not have to read all of a body first: its answer may be there.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(*self._request)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise


async def _done(future: asyncio.Future[None]) -> None:
    """Wait for a thread that ends now; who is called off meanwhile hears of it after."""
    called_off: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            called_off = error
    if called_off:
        raise called_off


def _is_silent(connected: socket.socket) -> bool:
    """Neither closed by the other end nor said anything that nobody has asked for."""
    with selectors.DefaultSelector() as selector:
        selector.register(connected, selectors.EVENT_READ)
        return not selector.select(0)


def _drop(connection: http.client.HTTPConnection, answer: Answer) -> None:
    # An answer with "Connection: close" owns the socket alone.
    answer.close()
    connection.close()


@cache
def _tls() -> ssl.SSLContext:
    """With the certificates that botocore trusts."""
    return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or get_cert_path(True))
