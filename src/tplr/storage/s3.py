"""Connections to S3-compatible servers, configured as R2 needs it: the only import of aiobotocore."""

import asyncio
import functools
import os
import ssl
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession

from tplr.config import checked_endpoint
from tplr.errors import StoreError
from tplr.schemas import Bucket
from tplr.storage.s3_border import close_with_call
from tplr.storage.s3_client import RefCountedClient
from tplr.storage.s3_exchange import IDLE_SECONDS, Server
from tplr.storage.s3_store import S3Store, TransferLimits
from tplr.storage.s3_wire import Wire

# A page of a listing is 1000 keys of 1024 bytes, percent-encoded: below 4 MiB.
_MAX_WHOLE_ANSWER = 8 * 2**20

# Downloads at a time; each has a thread, which mostly waits.
_THREADS = 64

# Nothing may come from this machine's AWS files or profile: an operator may have them for other work.
_NO_AWS_FILES = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}

_building = threading.Lock()


def endpoint_url(bucket: Bucket, override: str | None = None) -> str:
    """Where a bucket is served: its account's R2 endpoint, or the local configuration's ``override``.

    ``Bucket`` has checked the account id and the jurisdiction, so the host is one of Cloudflare's.
    """
    if override is not None:
        return override
    jurisdiction = "" if bucket.jurisdiction == "default" else f".{bucket.jurisdiction}"
    return f"https://{bucket.account_id}{jurisdiction}.r2.cloudflarestorage.com"


class S3Connections:
    """Owns one client for each endpoint and credential, from first use until the end of the ``async with`` block.

    Args:
        endpoint: ``http(s)://host[:port]`` of another S3-compatible server for all buckets; never from the chain.
        limits: default deadlines of all stores.
        region: what requests are signed for; R2's is ``auto``.

    Raises:
        ConfigError: ``endpoint`` is not such a URL.
    """

    def __init__(
        self, endpoint: str | None = None, *, limits: TransferLimits | None = None, region: str = "auto"
    ) -> None:
        self._endpoint = None if endpoint is None else checked_endpoint(endpoint, "S3 endpoint")
        self._limits = limits or TransferLimits()
        self._region = region
        self._open = False
        self._clients: dict[tuple[str, str, str], RefCountedClient] = {}
        self._servers: dict[str, Server] = {}
        self._tidied_at = 0.0

    async def __aenter__(self) -> Self:
        # Of their own: a store that keeps many waiting takes no thread from who writes a file.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="s3")
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._threads.shutdown(wait=False, cancel_futures=True)
        servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()
        clients, self._clients = self._clients, {}
        async with AsyncExitStack() as stack:
            for client in clients.values():
                stack.push_async_callback(client.close)
        await asyncio.to_thread(self._threads.shutdown)  # they have no more to do, and end

    def store(self, bucket: Bucket) -> S3Store:
        """The bucket's store; nothing is opened before its first request."""
        return S3Store(bucket, lambda: self._client(bucket).lend(), lambda: self._wire(bucket), self._limits)

    def _check_open(self, bucket: Bucket) -> None:
        if not self._open:
            raise StoreError("S3Connections is closed: use its stores inside its block", bucket=bucket.name)

    def _wire(self, bucket: Bucket) -> Wire:
        self._check_open(bucket)
        endpoint = endpoint_url(bucket, self._endpoint)
        self._close_idle()
        server = self._servers.setdefault(endpoint, Server(endpoint))
        return Wire(server, bucket, self._region, self._threads)

    def _close_idle(self) -> None:
        """Now and then: a server that is never asked again would keep its connections for ever."""
        now = time.monotonic()
        if now - self._tidied_at >= IDLE_SECONDS:
            self._tidied_at = now
            for server in self._servers.values():
                server.close_idle(IDLE_SECONDS)

    def _client(self, bucket: Bucket) -> RefCountedClient:
        self._check_open(bucket)
        endpoint, region = endpoint_url(bucket, self._endpoint), self._region
        identity = (endpoint, bucket.access_key_id, bucket.secret_access_key)
        return self._clients.setdefault(identity, RefCountedClient(lambda: _open_client(endpoint, bucket, region)))


@asynccontextmanager
async def _open_client(endpoint: str, bucket: Bucket, region: str) -> AsyncIterator[Any]:
    client = await asyncio.to_thread(_build_client, endpoint, bucket, region)
    try:
        yield client
    finally:
        await client.close()


def _build_client(endpoint: str, bucket: Bucket, region: str) -> Any:
    """A client that has no connection yet, for any event loop; takes a few milliseconds, the first time 0.1 seconds."""
    with _building:
        opened = _session().create_client(
            "s3",
            endpoint_url=endpoint,
            region_name=region,
            aws_access_key_id=bucket.access_key_id,
            aws_secret_access_key=bucket.secret_access_key,
            # Without TLS no certificate comes that would be checked by those of the authorities.
            verify=None if endpoint.startswith("https:") else False,
            config=_config(endpoint),
        )
        client = asyncio.run(opened.__aenter__())
    client.meta.events.register_last("before-parameter-build.s3", _redirected_before)
    return client


@functools.cache
def _session() -> AioSession:
    """One for the process, which reads the description of S3's interface once. Not for two threads at a time."""
    return AioSession(session_vars=_NO_AWS_FILES)


def _config(endpoint: str) -> AioConfig:
    return AioConfig(
        http_session_cls=_Transport,
        signature_version="s3v4",
        max_pool_connections=64,
        connect_timeout=5,
        read_timeout=10,
        tcp_keepalive=True,
        # with_retry is ours: botocore's standard mode does not retry R2's 429.
        retries={"mode": "standard", "total_max_attempts": 1},
        # R2 refuses botocore's default checksum trailers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
        # The environment's; as for ``s3_exchange``, there is none on the way to a server without TLS.
        proxies=None if endpoint.startswith("https:") else {},
    )


def _redirected_before(context: dict[str, Any], **_: Any) -> None:
    """Keep botocore from looking for the bucket's region: a server that redirects that too recurses without end."""
    context.setdefault("s3_redirect", {})["redirected"] = True


class _Transport(AIOHTTPSession):
    """aiobotocore's transport, made safe against the server at the other end."""

    def _build_verify_context(self) -> ssl.SSLContext:
        # Reading the authorities' certificates takes 30 milliseconds.
        return _tls_context(self._verify)

    async def _get_session(self, proxy_url: str | None) -> Any:
        return _Session(await super()._get_session(proxy_url))


@functools.cache
def _tls_context(verify: bool | str) -> ssl.SSLContext:
    """One for the process; ``verify`` is whether to, or the authorities' file."""
    return AIOHTTPSession(verify=verify)._build_verify_context()  # type: ignore[arg-type]


class _Session:
    """Never follows a redirect: that would send a request to a host of the server's choice."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **arguments: Any) -> "_Answer":
        response = await self._session.request(method, allow_redirects=False, **arguments)
        close_with_call(response)
        return _Answer(response)


class _Answer:
    """Bounds what is read whole: error bodies and listings."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    async def read(self) -> bytes:
        body = bytearray()
        async for chunk in self._response.content.iter_any():
            body += chunk
            if len(body) > _MAX_WHOLE_ANSWER:
                raise aiohttp.ClientPayloadError(f"an answer of more than {_MAX_WHOLE_ANSWER} bytes")
        return bytes(body)
