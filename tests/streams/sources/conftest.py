"""An R2-like server in a separate thread, because pipelines block the test's loop while they wait for it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tplr import config
from tplr.schemas import Bucket
from tplr.storage import S3Connections, s3_errors
from tplr.storage.retry import with_retry
from tplr.testing.s3server import Rules, Server, serve

READ_KEY, WRITE_KEY, TEMPORARY_KEY, SECRET = "a" * 32, "b" * 32, "e" * 32, "c" * 64
TOKEN = "t/" * 40


@dataclass
class Remote:
    """A server, its loop, and every request that reached it."""

    server: Server
    loop: asyncio.AbstractEventLoop
    requests: list[str] = field(default_factory=list)
    # A temporary credential that may read ``corpus``.
    temporary_key: str = TEMPORARY_KEY
    session_token: str = TOKEN
    secret: str = SECRET

    def put(self, objects: dict[str, bytes], bucket: str = "corpus") -> None:
        async def put() -> None:
            async with S3Connections(self.server.endpoint) as connections:
                owner = Bucket(name=bucket, account_id="d" * 32, access_key_id=WRITE_KEY, secret_access_key=SECRET)
                store = connections.store(owner)
                for key, data in objects.items():
                    await store.put(key, data)

        asyncio.run_coroutine_threadsafe(put(), self.loop).result(20)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Remote]:
    ready, box = threading.Event(), []
    root: Path = tmp_path_factory.mktemp("s3")
    keys = {key: {"secret": SECRET, "buckets": {"corpus": may}} for key, may in
            ((READ_KEY, "read"), (WRITE_KEY, "read-write"))}  # fmt: skip
    keys[WRITE_KEY]["buckets"]["open"] = "read-write"
    keys[TEMPORARY_KEY] = {"secret": SECRET, "session_token": TOKEN, "buckets": {"corpus": "read"}}
    rules = Rules(one_write_per_second=False, public_buckets=frozenset({"open"}))
    stop = asyncio.Event()

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # keeps the number of threads constant
        async with serve(root, keys, rules=rules) as server:
            box.append(Remote(server, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(20)
    yield box[0]
    box[0].loop.call_soon_threadsafe(stop.set)
    thread.join()


@pytest.fixture
def remote(running, monkeypatch, tmp_path) -> Iterator[Remote]:
    """The server, quick retries, and an environment that names its bucket ``corpus``."""
    for name in [name for name in config.Environment.read().variables if name.startswith(("R2_", "TPLR_", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPLR_CACHE_FOLDER", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READ_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.server.endpoint)
    monkeypatch.setitem(with_retry.__kwdefaults__, "base_seconds", 0.01)
    monkeypatch.setattr(s3_errors, "_THROTTLED_SECONDS", 0.05)
    take = running.server.faults.take
    running.requests.clear()

    def seen(method: str, target: str):
        running.requests.append(f"{method} {target}")
        return take(method, target)

    monkeypatch.setattr(running.server.faults, "take", seen)
    yield running
    running.server.faults.clear()
