"""What an aggregator's own disk does to it: nothing that a later try does not mend."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tplr.errors import StateError
from tplr.exchange.aggregates import IncludedSet, bundle, included_set
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.hparams import load_hparams
from tplr.node import aggregator
from tplr.node.aggregator import Aggregator
from tplr.node.replica import NodeContext
from tplr.telemetry import Telemetry
from tplr.telemetry.events import Event

WINDOW, BODY = 7, b"an update"


class Bucket:
    """What an aggregator asks of ``Comms``; nothing is published yet."""

    clock = SimpleNamespace(window=WINDOW + 1)

    def __init__(self) -> None:
        self.included: IncludedSet | None = None
        self.aggregate: bytes | None = None

    async def get_included(self, window: int) -> IncludedSet | None:
        return self.included

    async def get_aggregate(self, included: IncludedSet) -> bytes | None:
        return self.aggregate

    async def put_included(self, included: IncludedSet) -> None:
        self.included = included

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
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found, events, bucket) -> Aggregator:
    telemetry = Telemetry(role="aggregator", uid=0, listeners=(events.append,))
    context = NodeContext(comms=cast(Any, bucket), clock=cast(Any, bucket.clock), telemetry=telemetry)
    made = Aggregator(context, load_hparams(), cast(Any, SimpleNamespace(expected_size=len(BODY))), tmp_path)

    async def finding(_: object, *, excluded: object = ()) -> GatherResult[Any]:
        return found

    monkeypatch.setattr(made._windows, "from_peers", finding)
    monkeypatch.setattr(made._windows, "from_set", finding)
    return made


async def test_a_full_disk_is_reported_and_the_window_retried(node, bucket, events, found, monkeypatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise StateError(f"can't write {path}: the disk is full: free some space")

    with monkeypatch.context() as broken:
        broken.setattr(aggregator, "atomic_write", full)
        await node._aggregate(WINDOW, late=False)
    assert bucket.included is None
    assert "the disk is full" in events[0]["text"]
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate == bundle(included_set(found, load_hparams().version), [BODY])


async def test_a_stored_aggregate_that_was_damaged_is_fetched_again(node, bucket, found, tmp_path: Path) -> None:
    bucket.included = included_set(found, load_hparams().version)
    right = bundle(bucket.included, [BODY])
    node._bundle_path(bucket.included).write_bytes(right[:-1] + b"!")
    await node._aggregate(WINDOW, late=False)
    assert bucket.aggregate == right
    assert not [*tmp_path.iterdir()]


async def test_a_leader_that_aggregates_leaves_out_whom_it_excludes(node, bucket, found, monkeypatch) -> None:
    asked = []

    async def finding(window: int, *, excluded: object) -> GatherResult[Any]:
        asked.append((window, excluded))
        return found

    monkeypatch.setattr(node._windows, "from_peers", finding)
    monkeypatch.setattr(node, "_leader", SimpleNamespace(excluded=frozenset({7})))
    await node._aggregate(WINDOW, late=False)
    assert asked == [(WINDOW, {7})]
