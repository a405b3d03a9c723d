"""A network of 24 miners, 3 validators and an aggregator as real processes: as many as two cores carry."""

import csv
import json
from pathlib import Path

import pytest

from tplr.cli import main

MINERS, VALIDATORS = 24, 3
WINDOWS, SECONDS = 20, 30
MOST_OWN_BYTES = 200 * 2**20  # of a node; without a fork server it is 450 MB and more

pytestmark = [pytest.mark.localnet, pytest.mark.long, pytest.mark.timeout(1800)]


def test_two_dozen_miners_agree_and_are_paid(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    size = ("--miners", MINERS, "--validators", VALIDATORS, "--windows", WINDOWS, "--window-seconds", SECONDS)
    options = ("--small", "--share-imports", "--vocab-size", 1024, "--run-dir", folder)
    status = main(["localnet", *map(str, (*size, *options))])
    summary = json.loads((folder / "summary.json").read_text())
    told = "; ".join(f"{'ok' if one['passed'] else 'FAILED'} {one['text']}" for one in summary["outcomes"])
    # Equal models, one set for all, weights for every miner by every validator, and no stall.
    assert status == 0, told
    assert summary["shared_windows"] >= WINDOWS
    assert len(summary["weights"]) == VALIDATORS
    with (folder / "usage.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["windows"]) == WINDOWS]
    nodes = {row["name"]: row for row in rows if row["name"] not in ("localnet", "storage", "fork-server")}
    assert len(nodes) == MINERS + VALIDATORS + 1
    assert max(int(row["uss"]) for row in nodes.values()) < MOST_OWN_BYTES
