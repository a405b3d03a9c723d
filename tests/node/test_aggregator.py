"""Disk failures of an aggregator: a later attempt repairs all of them; and an aggregator decides nothing."""

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from included import included_set

from tplr.errors import StateError
from tplr.exchange.aggregates import IncludedSet, assemble
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.hparams import load_hparams
from tplr.node import own_aggregates
from tplr.node.aggregator import Aggregator
from tplr.node.replica import NodeContext
from tplr.telemetry import Telemetry
from tplr.telemetry.events import Event

WINDOW, BODY = 7, b"an update"


class Bucket:
    """The part of ``Comms`` that an aggregator uses."""

    clock = SimpleNamespace(window=WINDOW + 1)

    def __init__(self) -> None:
        self.aggregate: bytes | None = None

    async def own_aggregate(self, included: IncludedSet) -> bytes | None:
        return self.aggregate

    async def put_aggregate(self, included: IncludedSet, body: bytes) -> None:
        self.aggregate = body


@pytest.fixture
def found() -> GatherResult[Any]:
    one = GatheredUpdate(3, SimpleNamespace(body=BODY), hashlib.sha256(BODY).hexdigest(), len(BODY))
    return GatherResult(window=WINDOW, updates=(one,), skipped={})


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def decided(found: GatherResult[Any]) -> list[IncludedSet | None]:
    """The answers to the next requests for a decision."""
    return [included_set(found, load_hparams().version)]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found, events, bucket, decided) -> Aggregator:
    telemetry = Telemetry(role="aggregator", uid=0, listeners=(events.append,))
    context = NodeContext(comms=cast(Any, bucket), clock=cast(Any, bucket.clock), telemetry=telemetry)
    made = Aggregator(context, load_hparams(), cast(Any, SimpleNamespace(expected_size=len(BODY))), tmp_path)

    async def finding(*_: object) -> GatherResult[Any]:
        return found

    async def what_was_decided(_: int) -> IncludedSet | None:
        return decided.pop(0) if len(decided) > 1 else decided[0]

    monkeypatch.setattr(made._windows, "from_peers", finding)
    monkeypatch.setattr(made._windows, "from_set", finding)
    monkeypatch.setattr(made._windows, "decided", what_was_decided)
    return made


async def test_a_full_disk_is_reported_and_the_window_retried(node, bucket, events, decided, monkeypatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise StateError(f"can't write {path}: the disk is full: free some space")

    with monkeypatch.context() as broken:
        broken.setattr(own_aggregates, "atomic_write", full)
        await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate is None
    assert "the disk is full" in events[0]["text"]
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate == assemble(decided[0], [BODY])


async def test_a_stored_aggregate_that_was_damaged_is_fetched_again(node, bucket, decided, tmp_path: Path) -> None:
    right = assemble(decided[0], [BODY])
    node._aggregates.path(decided[0]).write_bytes(right[:-1] + b"!")
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate == right
    assert not [*tmp_path.iterdir()]


async def test_a_file_that_can_t_be_read_or_deleted_does_not_end_the_node(node, bucket, decided, caplog) -> None:
    """A directory in place of a file can be neither read nor deleted as one, like a file on a failing disk."""
    stored = node._aggregates.path(decided[0])
    stored.mkdir()
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate is None
    assert f"stored aggregate of window {WINDOW} not used: " in caplog.text
    await node._aggregates.drop_before(WINDOW + 1)
    assert f"{stored} not deleted: " in caplog.text
    stored.rmdir()
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate == assemble(decided[0], [BODY])


async def test_nothing_is_published_before_it_is_decided(node, bucket, decided) -> None:
    decided.insert(0, None)
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate is None
    assert WINDOW in node._due(WINDOW, newest=WINDOW + 1)
    await node._aggregate(WINDOW, late=True)
    assert bucket.aggregate
    assert WINDOW not in node._due(WINDOW, newest=WINDOW + 1)


async def test_what_was_never_published_does_not_stay_for_ever(node, decided, tmp_path: Path) -> None:
    old, kept = node._aggregates.path(decided[0]), tmp_path / f"window-{WINDOW + 1}-3-abc"
    for path in (old, kept, tmp_path / "window-x-y"):
        path.write_bytes(BODY)
    await node._aggregates.drop_before(WINDOW)
    assert old.exists()
    await node._aggregates.drop_before(WINDOW + 1)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "window-x-y"}
    node._tried[WINDOW] = 3
    node._due(0, newest=WINDOW + node._hparams.gradient_retention_windows)
    assert WINDOW not in node._tried


@pytest.mark.parametrize("kept", [False, True])
async def test_updates_are_joined_outside_the_event_loop(kept: bool, tmp_path: Path, monkeypatch) -> None:
    """They may have gigabytes."""
    threads = []

    def joined(included: IncludedSet, bodies: list[bytes]) -> bytes:
        threads.append(threading.current_thread())
        return assemble(included, bodies)

    async def from_set(*_: Any) -> Any:
        return SimpleNamespace(updates=[SimpleNamespace(update=SimpleNamespace(body=b"update"))])

    monkeypatch.setattr(own_aggregates, "assemble", joined)
    aggregates = own_aggregates.OwnAggregates(cast(Any, None), cast(Any, SimpleNamespace(from_set=from_set)), tmp_path)
    included = IncludedSet(window=7, version="1", included=(), skipped={}, success_rate=0.0)
    if kept:
        await aggregates.keep(GatherResult(window=7, updates=(), skipped={}))
    body = await aggregates._body(included, None)
    assert body.endswith(b"update")
    assert aggregates.path(included).exists() != kept
    assert threading.main_thread() not in threads
    assert len(threads) == 1
