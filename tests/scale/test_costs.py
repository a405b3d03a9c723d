"""Costs: those that must not grow with all uids do not, and the tables name all that grow."""

import pytest

from tplr.exchange.retention import AGGREGATES, EACH_WINDOW
from tplr.planner.traffic import aggregator_traffic, traffic
from tplr.scale.costs import Cost, Network, Participant, cost, measures, sequences_read
from tplr.scale.sizes import workload


def of(who: Participant, uids: int, probation: int | None = None) -> Cost:
    load = workload("1B")
    network = Network.of(uids, load.hparams, probation=probation)
    return cost(load, who, network, wait=20.0, until_decided=5.0)


def test_a_miners_own_work_is_that_of_the_selected_peers() -> None:
    small, large = of("miner", 256), of("miner", 10_000)
    assert (small.reads, small.down, small.up, small.cpu, small.memory, small.writes) == pytest.approx(
        (large.reads, large.down, large.up, large.cpu, large.memory, large.writes)
    )


def test_what_readers_cost_a_bucket_grows_with_the_readers() -> None:
    assert of("miner", 10_000).served_reads == pytest.approx(10_000 / 256 * of("miner", 256).served_reads)


def test_a_validators_bytes_grow_with_probation_alone() -> None:
    assert of("validator", 10_000).down > 30 * of("validator", 256).down
    assert of("validator", 10_000, probation=20).down == of("validator", 256, probation=20).down


def test_own_requests_are_those_of_the_planner() -> None:
    load = workload("1B")
    assert of("aggregator", 256).writes == aggregator_traffic(load, readers=0).class_a == len(AGGREGATES) + 1
    assert of("miner", 256).writes == traffic(load, "miner", readers=0).class_a == len(EACH_WINDOW) + 3
    # The planner counts a peer list in each window, a checkpoint's parts, and an aggregate of each window as an upper
    # bound.
    validator, parts = traffic(load, "validator", readers=0).class_a, 3
    assert of("validator", 256).writes == pytest.approx(validator - parts - 1 - 9 / 20)


def test_requests_are_paid_by_class() -> None:
    one = of("miner", 256)
    expected = (one.writes * 4.5e-6 + one.served_reads * 0.36e-6) * 72
    assert one.dollars_a_day(1200.0) == pytest.approx(expected)


def test_measures_grow_with_the_tested_uids() -> None:
    load = workload("1B")
    few, many = (
        measures(load, tested=tested, sequences=sequences_read(load), gpu="h200", gpus=8, mfu=0.4) for tested in (8, 80)
    )
    assert few.gradient == many.gradient
    assert many.own_pages == pytest.approx(10 * few.own_pages)
    assert sequences_read(load) == 576
