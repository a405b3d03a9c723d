"""Commits and updates are judged by their write time: a lost response must not make them late."""

import hashlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tplr.exchange import first_answer
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.exchange.updates import find_by_hash, put_commit, put_update
from tplr.keys import commit_key, gradient_key
from tplr.schemas import Bucket
from tplr.storage import MemoryStore, ObjectStore, S3Connections
from tplr.storage.retry import with_retry
from tplr.testing.s3server import Delay, LoseResponse, Rules, Server, Status, serve

BUCKET = Bucket(name="bucket", account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)
KEYS = {BUCKET.access_key_id: {"secret": BUCKET.secret_access_key, "buckets": {"bucket": "read-write"}}}
T0 = 1_700_000_000.0
BODY = b"update" * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()
COMMIT, UPDATE = commit_key(7, 3, "1"), gradient_key(7, 3, "1")


class Clock:
    """The server's clock: every request takes five seconds."""

    now = T0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, ObjectStore, Clock]]:
    monkeypatch.setitem(with_retry.__kwdefaults__, "base_seconds", 0.01)  # pyright: ignore[reportArgumentType]
    clock = Clock()
    async with (
        serve(tmp_path, KEYS, rules=Rules(max_clock_skew=1e12), clock=clock) as server,
        S3Connections(server.endpoint) as connections,
    ):
        take = server.faults.take

        def timed(method: str, target: str) -> object:
            clock.now += 5.0
            return take(method, target)

        monkeypatch.setattr(server.faults, "take", timed)
        store = connections.store(BUCKET)
        yield server, store, clock


@pytest.mark.parametrize("warm", [False, True])
async def test_what_was_written_in_time_stays_so_when_the_answer_gets_lost(
    place: tuple[Server, ObjectStore, Clock], warm: bool
) -> None:
    server, store, clock = place
    if warm:  # also over a connection that has served before
        await store.put("other", b"x")
    for key, send in (
        (COMMIT, lambda: put_commit(store, 7, 3, SHA256, "1")),
        (UPDATE, lambda: put_update(store, 7, 3, BODY, "1", deadline_seconds=30)),
    ):
        server.faults.add(f"^PUT .*{key}", LoseResponse())
        due = clock.now + 5.0
        await send()
        assert (await store.head(key)).last_modified == due
    assert (await store.head(COMMIT)).metadata == {"sha256": SHA256}


async def test_what_is_there_of_other_bytes_is_replaced(place: tuple[Server, ObjectStore, Clock]) -> None:
    server, store, _ = place
    await put_commit(store, 7, 3, "0" * 64, "1")
    await put_update(store, 7, 3, b"older", "1", deadline_seconds=30)
    server.faults.add("^PUT ", Status(503, "SlowDown"))
    await put_commit(store, 7, 3, SHA256, "1")
    server.faults.add("^PUT ", Status(503, "SlowDown"))
    info = await put_update(store, 7, 3, BODY, "1", deadline_seconds=30)
    assert (await store.head(COMMIT)).metadata == {"sha256": SHA256}
    assert await store.get(UPDATE, max_bytes=len(BODY)) == BODY
    assert info.last_modified == (await store.head(UPDATE)).last_modified


async def test_who_puts_again_on_purpose_writes_anew(place: tuple[Server, ObjectStore, Clock]) -> None:
    """Like a peer that published too early."""
    _, store, _ = place
    first = await put_update(store, 7, 3, BODY, "1", deadline_seconds=30)
    second = await put_update(store, 7, 3, BODY, "1", deadline_seconds=30)
    assert second.last_modified > first.last_modified


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_an_update_is_found_beside_a_bucket_that_hangs_or_has_another(served, monkeypatch, method: str) -> None:
    monkeypatch.setattr(first_answer, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(first_answer, "ANSWER_SECONDS", 0.5)
    other, right = MemoryStore(), MemoryStore()
    await other.put(UPDATE, BODY[:-1] + b"!")
    await served.store.put(UPDATE, BODY)
    served.server.faults.add(f"^{method} ", Delay(3600), times=None)
    began = time.monotonic()
    stores = {"hangs": served.store, "other": other, "right": right}
    assert await find_by_hash(stores, UPDATE, SourceSpeeds(), sha256=SHA256, size=len(BODY)) is None
    await right.put(UPDATE, BODY)
    assert await find_by_hash(stores, UPDATE, SourceSpeeds(), sha256=SHA256, size=len(BODY)) == BODY
    assert time.monotonic() - began < 5.0


async def test_who_sends_other_bytes_is_asked_last_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked: list[str] = []

    class Noted(MemoryStore):
        async def get(self, key: str, **more: Any) -> bytes:
            asked.append(self.name)
            return await super().get(key, **more)

    false, right, speeds = Noted("false"), Noted("right"), SourceSpeeds()
    other = BODY[:-1] + b"!"
    await false.put(UPDATE, other)
    await right.put(UPDATE, BODY)
    stores = {"false": false, "right": right}
    for _ in range(3):
        assert await find_by_hash(stores, UPDATE, speeds, sha256=SHA256, size=len(BODY)) == BODY
    assert asked == ["false", "right", "right", "right"]
    assert await find_by_hash({"false": false}, UPDATE, speeds, sha256=SHA256, size=len(BODY)) is None
    found = hashlib.sha256(other).hexdigest()
    assert f"false/{UPDATE}: its SHA-256 is {found}, expected {SHA256}" in caplog.text
