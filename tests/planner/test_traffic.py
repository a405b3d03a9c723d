"""Traffic of a miner and of a validator, and its price."""

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tplr.exchange.retention import AGGREGATES, delete_stale
from tplr.planner.traffic import (
    ELECTION_READS,
    ELECTION_RECEIVED,
    ELECTION_SENT,
    ELECTION_WRITES,
    aggregator_traffic,
    traffic,
)
from tplr.planner.workload import Workload
from tplr.schemas import ObjectInfo
from tplr.scoring.selection import FEWEST_ON_PROBATION
from tplr.storage import MemoryStore
from tplr.storage.parts import count_parts

TABLE = Path(__file__).parents[2] / "docs" / "benchmarks" / "trust.csv"


def test_price_by_hand(sparseloco):
    flow = traffic(Workload.of(sparseloco), "miner", readers=10)
    price = flow.dollars_per_month(1380.0)
    windows = 30 * 86400 / 1380
    assert price["class A"] == pytest.approx(windows * flow.class_a * 4.5e-6)
    assert price["class B"] == pytest.approx(windows * flow.class_b * 0.36e-6)
    assert price["storage"] == pytest.approx(flow.stored / 1e9 * 0.015)


def test_readers_pay_only_in_reads(sparseloco):
    load = Workload.of(sparseloco)
    few, many = (traffic(load, "miner", readers=n) for n in (1, 100))
    assert (many.class_a, many.class_b) == (few.class_a, 100 * few.class_b)


class CountingStore(MemoryStore):
    """Counts its listings."""

    lists = 0

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        self.lists += 1
        return await super().list(prefix, start_after=start_after, limit=limit)


async def test_old_objects_take_as_many_lists_as_nodes_send(sparseloco):
    own, aggregates = CountingStore("own"), CountingStore("aggregates")
    await delete_stale(own, uid=1, before=9, version="1")
    await delete_stale(aggregates, uid=None, before=9, version="1", kinds=AGGREGATES)
    load = Workload.of(sparseloco)
    checkpoint = round(count_parts(4 * load.parameters) / sparseloco.checkpoint_frequency)
    miner, validator = (traffic(load, role, readers=0) for role in ("miner", "validator"))
    assert miner.class_a == own.lists + 3  # commit, update, report
    # Report, seal, scores, a peer list at intervals; and what an election and its aggregate take.
    assert validator.class_a == own.lists + aggregates.lists + 4 + ELECTION_WRITES + 1 + checkpoint
    assert aggregator_traffic(load, readers=0).class_a == aggregates.lists + 1


def test_an_update_is_read_in_one_request_and_a_large_aggregate_is_stored_in_parts(sparseloco):
    load = Workload.of(sparseloco)
    large = replace(load, update_bytes=10 * load.update_bytes)
    assert traffic(large, "miner", readers=1).class_b == traffic(load, "miner", readers=1).class_b == 5
    size = 10**9 * sparseloco.max_topk_peers
    stored = aggregator_traffic(replace(load, update_bytes=10**9), readers=0).class_a
    assert stored == len(AGGREGATES) + count_parts(size) + 2  # and begin and end


def measured() -> dict[str, float]:
    """Return the figures of one elector among five that answer: means of the benchmark's repetitions."""
    with TABLE.open() as file:
        rows = [row for row in csv.DictReader(file) if (row["case"], row["validators"]) == ("all answer", "5")]
    return {name: statistics.mean(float(row[name]) for row in rows) for name in ("requests", "read_kB", "written_kB")}


def test_a_validator_sends_checkpoints_aggregates_and_what_an_election_takes(sparseloco):
    load = Workload.of(sparseloco)
    miner, validator = (traffic(load, role, readers=10) for role in ("miner", "validator"))
    aggregate = sparseloco.max_topk_peers * load.update_bytes
    sent = validator.uploaded - miner.uploaded
    checkpoint = 4 * load.parameters
    # A miner sends its update and nothing else.
    assert miner.uploaded == load.update_bytes
    assert sent == aggregate - load.update_bytes + ELECTION_SENT + checkpoint // sparseloco.checkpoint_frequency
    # Every node asks the list and its reserve; a validator fetches to vote, to apply and to measure.
    listed, named = sparseloco.max_topk_peers, sparseloco.max_topk_peers + sparseloco.reserve_peers
    assert miner.downloaded == named * load.update_bytes
    fetched = named + listed + sparseloco.reserve_peers + FEWEST_ON_PROBATION
    assert validator.downloaded == fetched * load.update_bytes + ELECTION_RECEIVED
    checkpoints = sparseloco.checkpoint_frequency * (sparseloco.checkpoints_kept + 1)
    kept = max(sparseloco.gradient_retention_windows, checkpoints)
    updates = load.update_bytes * sparseloco.gradient_retention_windows
    assert miner.stored == updates
    assert validator.stored == aggregate * kept + checkpoint * sparseloco.checkpoints_kept


def test_an_election_takes_what_was_measured():
    """Within a fifth; the figures are rounded."""
    found = measured()
    assert pytest.approx(found["requests"], rel=0.2) == ELECTION_WRITES + ELECTION_READS
    assert pytest.approx(1000 * found["read_kB"], rel=0.2) == ELECTION_RECEIVED
    assert pytest.approx(1000 * found["written_kB"], rel=0.2) == ELECTION_SENT
