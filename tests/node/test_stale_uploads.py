"""Unfinished uploads of a killed node are aborted at the next start, concurrently with the rest of the start."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tplr.clock import Tick
from tplr.keys import RunVersion
from tplr.node import stale_uploads
from tplr.node.main import _run
from tplr.node.stale_uploads import AGE_SECONDS, abort_stale_uploads
from tplr.schemas import Bucket
from tplr.storage import ObjectStore, S3Connections
from tplr.telemetry import Telemetry
from tplr.testing.s3server import Delay, Rules, Server, Status, serve

BUCKET = Bucket(name="bucket", account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)
KEYS = {BUCKET.access_key_id: {"secret": BUCKET.secret_access_key, "buckets": {"bucket": "read-write"}}}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[Server, ObjectStore]]:
    """A bucket with an upload that began long ago, and one that began just now."""
    ago = AGE_SECONDS + 60
    rules = Rules(max_clock_skew=2 * ago)
    async with (
        serve(tmp_path, KEYS, rules=rules, clock=lambda: time.time() - ago) as server,
        S3Connections(server.endpoint) as connections,
    ):
        store = connections.store(BUCKET)
        assert store.multipart
        await store.multipart.create("old")
        ago = 0.0
        await store.multipart.create("young")
        yield server, store


async def keys(store: ObjectStore) -> list[str]:
    assert store.multipart
    return [upload.key for upload in await store.multipart.unfinished()]


async def test_old_uploads_are_aborted_and_young_ones_stay(place: tuple[Server, ObjectStore]) -> None:
    _, store = place
    await abort_stale_uploads(store)
    assert await keys(store) == ["young"]


async def test_a_store_that_fails_or_hangs_costs_nothing_but_a_warning(
    place: tuple[Server, ObjectStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, store = place
    monkeypatch.setattr(stale_uploads, "TIME_LIMIT_SECONDS", 0.2)
    for fault, said in ((Status(403, "AccessDenied"), "access denied"), (Delay(60), "took too long")):
        caplog.clear()
        server.faults.add("uploads", fault)
        with caplog.at_level(logging.WARNING):
            await abort_stale_uploads(store)
        assert said in caplog.text
    assert await keys(store) == ["old", "young"]


class Clock:
    blocks_per_window, block_time = 10, 1.0

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def wait_for_window(self, window: int) -> int:
        return window

    async def ticks(self) -> AsyncIterator[Tick]:
        await asyncio.Event().wait()
        yield Tick(0, 0)


async def test_a_node_does_it_at_its_start_without_waiting_and_ends_with_it(place: tuple[Server, ObjectStore]) -> None:
    server, store = place
    hang = server.faults.add("uploads", Delay(60))
    comms = SimpleNamespace(uid=0, own_stores=[store], run_refresh=Clock().run, run_cleanup=Clock().run)
    context = SimpleNamespace(comms=comms, clock=Clock(), telemetry=Telemetry(role="miner", uid=0, listeners=()))
    working = asyncio.Event()

    class Role:
        async def run(self) -> None:
            working.set()
            await asyncio.Event().wait()

    node: Any = SimpleNamespace(
        role=Role(), context=context, version=RunVersion("1"), bucket=BUCKET, connections=None, folder=None
    )

    async def start() -> None:
        task = asyncio.create_task(_run("miner", node))
        await working.wait()
        working.clear()
        try:
            async with asyncio.timeout(10):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async with asyncio.timeout(10):
        condition = lambda: hang.left == 0  # noqa: E731 - the store has the request, and will not answer
        await start()
        assert await keys(store) == ["old", "young"]
        found = server.objects.folder("bucket") / "uploads"
        condition = lambda: len(list(found.iterdir())) == 1  # noqa: E731
        await start()
    assert await keys(store) == ["young"]
