"""Traffic of a miner and of a validator, and its price."""

import pytest

from tplr.planner.traffic import traffic
from tplr.planner.workload import Workload


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


def test_a_validator_sends_no_update(sparseloco):
    load = Workload.of(sparseloco)
    miner, validator = (traffic(load, role, readers=10) for role in ("miner", "validator"))
    assert miner.uploaded - validator.uploaded == load.update_bytes
    assert miner.stored - validator.stored == load.update_bytes * sparseloco.gradient_retention_windows
