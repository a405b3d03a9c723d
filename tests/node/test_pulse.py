"""Once per window, a node reports its disk, its requests and its GPUs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tplr.clock import WindowClock
from tplr.errors import ObjectNotFound, StoreUnavailable
from tplr.node import pulse
from tplr.node.gpus import of_window, read_gpus
from tplr.node.pulse import beat
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.telemetry import Telemetry
from tplr.testing.s3server import Status, serve

BUCKET = Bucket(name="bucket", account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)
KEYS = {BUCKET.access_key_id: {"secret": BUCKET.secret_access_key, "buckets": {"bucket": "read-write"}}}


async def test_each_window_has_one_pulse_with_the_requests_since_the_last(tmp_path: Path) -> None:
    coming: asyncio.Queue[int] = asyncio.Queue()

    async def blocks() -> AsyncIterator[int]:
        while True:
            yield await coming.get()

    clock = WindowClock(blocks, blocks_per_window=4, block_time=0.5)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    telemetry = Telemetry(role="miner", uid=3, listeners=(lambda event: events.put_nowait(dict(event)),))
    context: Any = SimpleNamespace(clock=clock, telemetry=telemetry)
    async with serve(tmp_path / "s3", KEYS) as server, S3Connections(server.endpoint) as connections:
        running = [asyncio.create_task(clock.run()), asyncio.create_task(beat(context, connections, tmp_path))]
        store = connections.store(BUCKET)
        await store.put("there", b"1")
        server.faults.add("GET /bucket/there", Status(503, "SlowDown"), times=1)
        with pytest.raises(StoreUnavailable):
            await store.get("there", max_bytes=9)
        with pytest.raises(ObjectNotFound):
            await store.head("elsewhere")
        coming.put_nowait(9)
        first = await events.get()
        await store.get("there", max_bytes=9)
        coming.put_nowait(12)
        second = await events.get()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    assert (first["event"], first["window"], first["block"], first["window_seconds"]) == ("pulse", 2, 9, 2.0)
    assert first["storage_requests"] == {"ok": 1, "StoreUnavailable": 1, "ObjectNotFound": 1}
    assert (second["window"], second["storage_requests"]) == (3, {"ok": 1})
    assert 0 <= second["block_age"] < 10
    assert second["free_bytes"] > 0


async def test_a_pulse_has_the_gpus_measures_of_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miner trains for most of a window, and is idle when the next one begins."""
    coming: asyncio.Queue[int] = asyncio.Queue()

    async def blocks() -> AsyncIterator[int]:
        while True:
            yield await coming.get()

    training, sampled = True, asyncio.Queue[None]()
    loop = asyncio.get_running_loop()

    def read() -> dict[str, dict[str, float]]:
        loop.call_soon_threadsafe(sampled.put_nowait, None)
        return {"0": {"busy": 1.0, "celsius": 80.0} if training else {"busy": 0.0, "celsius": 40.0}}

    monkeypatch.setattr(pulse, "read_gpus", read)
    monkeypatch.setattr(pulse, "MIN_SAMPLE_SECONDS", 0.0)
    clock = WindowClock(blocks, blocks_per_window=4, block_time=0.1)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    telemetry = Telemetry(role="miner", uid=3, listeners=(lambda event: events.put_nowait(dict(event)),))
    context: Any = SimpleNamespace(clock=clock, telemetry=telemetry)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        others = asyncio.all_tasks()
        connections: Any = SimpleNamespace(results={})
        running = [group.create_task(one) for one in (clock.run(), beat(context, connections, tmp_path))]
        coming.put_nowait(8)
        await events.get()
        for _ in range(sampled.qsize() + 3):
            await sampled.get()
        training = False
        coming.put_nowait(12)
        found = (await events.get())["gpus"]["0"]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert asyncio.all_tasks() == others  # its task for samples has ended, too
    assert found["busy"] > 0
    assert found["celsius"] == 80


def test_measures_of_a_window_are_means_and_the_largest() -> None:
    samples = [{"0": {"busy": 1.0, "watts": 700.0, "celsius": 80.0}}, {}, {"0": {"busy": 0.0, "celsius": 40.0}}]
    assert of_window(samples) == {"0": {"busy": 0.5, "watts": 700.0, "celsius": 80.0}}
    assert of_window([]) == {}


async def test_a_disk_that_does_not_answer_ends_no_node(tmp_path: Path) -> None:
    """A failing save ends no node either."""

    async def blocks() -> AsyncIterator[int]:
        yield 8
        await asyncio.Event().wait()

    clock = WindowClock(blocks, blocks_per_window=4, block_time=0.5)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    telemetry = Telemetry(role="miner", uid=3, listeners=(lambda event: events.put_nowait(dict(event)),))
    context: Any = SimpleNamespace(clock=clock, telemetry=telemetry)
    connections: Any = SimpleNamespace(results={})
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = [
            group.create_task(one) for one in (clock.run(), beat(context, connections, tmp_path / "not mounted"))
        ]
        assert (await events.get())["free_bytes"] is None
        for task in running:
            task.cancel()


def test_gpus_are_told_by_index_and_none_without_a_driver() -> None:
    found = read_gpus()
    driver = Path("/proc/driver/nvidia/version").exists()
    assert bool(found) == driver
    for index, measures in found.items():
        assert index.isdecimal()
        assert measures["total_bytes"] >= measures["used_bytes"] > 0
        assert 0 <= measures["busy"] <= 1
