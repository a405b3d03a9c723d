"""Every store under one contract, and a raw server with scripted answers."""

import asyncio
import contextlib
import itertools
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import pytest_asyncio
from botocore.config import Config
from moto.server import ThreadedMotoServer

from tplr.schemas import Bucket
from tplr.storage import (
    DirectoryStore,
    MemoryStore,
    ObjectStore,
    S3Connections,
    S3Store,
    TransferLimits,
    parts,
    s3_errors,
)
from tplr.storage.retry import with_retry
from tplr.testing.s3server import Rules, Server, serve

KEY_ID = "0123456789abcdef" * 2
SECRET = "fedcba9876543210" * 4


def make_bucket(name: str = "bucket") -> Bucket:
    return Bucket(name=name, account_id="a" * 32, access_key_id=KEY_ID, secret_access_key=SECRET)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


# Contract tests share one event loop, so that servers and connections are made once; every test has its own bucket.
# pytest-xdist may return to a module after another one and create its fixtures again: bucket names continue, because
# moto's process stays.
BUCKETS_OF_A_MODULE = 200
_numbers = itertools.count()


def bucket_names() -> list[str]:
    return [f"bucket-{next(_numbers)}" for _ in range(BUCKETS_OF_A_MODULE)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def moto_stores(moto_endpoint: str) -> AsyncIterator[Iterator[ObjectStore]]:
    client = boto3.client(
        "s3",
        endpoint_url=moto_endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}),
    )
    async with S3Connections(moto_endpoint) as connections:
        # Lazy: a bucket is created when a test requests it.
        yield (connections.store(make_bucket(name)) for name in bucket_names() if client.create_bucket(Bucket=name))
    client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def r2_stores(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Iterator[ObjectStore]]:
    names = bucket_names()
    keys = {KEY_ID: {"secret": SECRET, "buckets": dict.fromkeys(names, "read-write")}}
    # The contract overwrites without a pause; R2's limit of one write per second has its own test.
    rules = Rules(one_write_per_second=False)
    async with (
        serve(tmp_path_factory.mktemp("r2"), keys, port=0, rules=rules) as server,
        S3Connections(server.endpoint) as connections,
    ):
        yield (connections.store(make_bucket(name)) for name in names)


@pytest.fixture(params=["memory", "directory", "moto", "r2"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty bucket of each kind."""
    match request.param:
        case "memory":
            return MemoryStore()
        case "directory":
            return DirectoryStore(tmp_path / "store")
        case kind:
            return next(request.getfixturevalue(f"{kind}_stores"))


@dataclass
class RawServer:
    """Answers every request with ``answer(writer)`` after reading it."""

    answer: Callable[[asyncio.StreamWriter], Awaitable[None]]
    endpoint: str = ""
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # set when a client has left

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                left = int(lengths[0].split(":")[1]) if lengths else 0
                while left:
                    left -= len(await reader.readexactly(min(left, 2**16)))
                await self.answer(writer)
        self.closed.set()
        writer.close()


class RawPorts:
    """Listeners that the tests of a module share, and the client of each: creating one costs more than most tests.

    Attributes:
        used: the servers of the running test; the first has the first port.
    """

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self.used: list[RawServer] = []
        self._stack = stack
        self._endpoints: list[str] = []
        self._connections: dict[str, S3Connections] = {}

    async def start(self, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> RawServer:
        number = len(self.used)
        self.used.append(RawServer(answer))
        if number == len(self._endpoints):

            async def serve_current(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self.used[number].serve(reader, writer)

            server = await asyncio.start_server(serve_current, "127.0.0.1", 0)
            self._stack.callback(server.close)
            self._endpoints.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        self.used[number].endpoint = self._endpoints[number]
        return self.used[number]

    async def store(self, endpoint: str, limits: TransferLimits | None = None) -> S3Store:
        if endpoint not in self._connections:
            self._connections[endpoint] = await self._stack.enter_async_context(S3Connections(endpoint))
        store = self._connections[endpoint].store(make_bucket())
        return S3Store(replace(store.client, limits=limits or TransferLimits()))

    async def hang_up(self) -> None:
        """Close all connections, so that none is left for the next test."""
        for raw in self.used:
            for writer in raw.writers:
                writer.close()
        await asyncio.sleep(0.01)
        self.used.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def raw_ports() -> AsyncIterator[RawPorts]:
    async with contextlib.AsyncExitStack() as stack:
        yield RawPorts(stack)


@pytest_asyncio.fixture(loop_scope="module")
async def raw_server(raw_ports: RawPorts) -> AsyncIterator[Callable[..., Awaitable[RawServer]]]:
    """``await raw_server(answer)`` gives a server at ``.endpoint``."""
    yield raw_ports.start
    await raw_ports.hang_up()


@pytest.fixture
def connect(raw_ports: RawPorts) -> Callable[..., Awaitable[S3Store]]:
    """``await connect(endpoint, limits)`` gives a store of ``make_bucket()`` there."""
    return raw_ports.store


PART = 2**16  # bytes of a part in tests of transfers
# For tests that wait until a call is given up. Others count requests, and may run on a busy machine.
HASTY = TransferLimits(call_seconds=2, grace_seconds=0.5, download_floor=2**20, upload_floor=2**22)


@dataclass
class R2:
    """A server with R2's rules and small parts, a store on it, an impatient store, and every received request."""

    server: Server
    store: S3Store
    hasty: S3Store
    root: Path
    requests: list[str]

    def seen(self, pattern: str) -> list[str]:
        return [request for request in self.requests if re.search(pattern, request)]


ONE_BUCKET = {KEY_ID: {"secret": SECRET, "buckets": {"bucket": "read-write"}}}


class Place:
    """A server and a client that the tests of a module share; each test starts with an empty bucket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ahead = 0.0
        self.server: Server
        self.connections: S3Connections

    def clock(self) -> float:
        return time.time() + self.ahead

    def empty(self) -> None:
        """Remove all objects, uploads and faults, and reset R2's limit of one second between two writes of a key."""
        shutil.rmtree(self.folder / "buckets" / "bucket", ignore_errors=True)
        self.server.objects._buckets.clear()
        self.server.keys.replace(ONE_BUCKET)
        self.server.faults.clear()
        self.ahead += 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def r2_place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """A module whose ``OVERWRITES`` is true is spared R2's wait between two writes of a key."""
    place = Place(tmp_path_factory.mktemp("r2"))
    rules = Rules(min_part_bytes=PART, one_write_per_second=not getattr(request.module, "OVERWRITES", False))
    async with (
        serve(place.folder, ONE_BUCKET, rules=rules, clock=place.clock) as place.server,
        S3Connections(place.server.endpoint) as place.connections,
    ):
        yield place


@pytest_asyncio.fixture(loop_scope="module")
async def r2(r2_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[R2]:
    """Retries come at once. At the end no task of a transfer is running."""
    monkeypatch.setattr(parts, "MIB", PART)
    monkeypatch.setattr(parts, "MIN_PART_BYTES", PART)
    monkeypatch.setitem(with_retry.__kwdefaults__, "base_seconds", 0.01)
    monkeypatch.setattr(s3_errors, "_THROTTLED_SECONDS", 0.05)
    server = r2_place.server
    requests: list[str] = []
    take = server.faults.take

    def seen(method: str, target: str) -> Any:
        requests.append(f"{method} {target}")
        return take(method, target)

    monkeypatch.setattr(server.faults, "take", seen)
    root = tmp_path / "files"
    root.mkdir()
    store = r2_place.connections.store(make_bucket())
    yield R2(server, store, S3Store(replace(store.client, limits=HASTY)), root, requests)
    names = {repr(task.get_coro()) for task in asyncio.all_tasks()}
    assert not {name for name in names if "for_each" in name or "transfer" in name}
    r2_place.empty()
