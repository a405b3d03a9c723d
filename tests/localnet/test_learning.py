"""The README's first command shows a model that learns: the project's target for its default network."""

import json
from pathlib import Path

import pytest

from tplr.cli import main

FALL = 0.35  # of the validator's loss on held-out pages, over the run's 20 windows


@pytest.mark.localnet
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_default_network_learns(tmp_path: Path) -> None:
    status = main(["localnet", "--miners", "3", "--windows", "20", "--run-dir", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert status == 0, [one for one in summary["outcomes"] if not one["passed"]]
    assert summary["windows_done"] == summary["windows_asked"] == 20
    assert 1 - summary["loss_end"] / summary["loss_start"] >= FALL
