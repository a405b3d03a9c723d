"""Networks of three validators as real processes: honest, with one that lies, and with faults."""

import json
import shutil
from pathlib import Path

import pytest

from tplr.cli import main
from tplr.localnet.attackers.forgery import BEHAVIOURS
from tplr.localnet.plan import Byzantine, make_plan
from tplr.localnet.summary import summarize
from tplr.localnet.supervisor import Localnet

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
SECONDS = "16"
WINDOWS = len(BEHAVIOURS) + 2  # each behaviour comes at least once

pytestmark = [pytest.mark.localnet, pytest.mark.timeout(420)]


def run_localnet(folder: Path, *options: str) -> tuple[int, dict]:
    """The exit status and the summary of ``tplr localnet`` with three validators and two miners."""
    status = main(["localnet", "--miners", "2", "--validators", "3", "--run-dir", str(folder), *options])
    return status, json.loads((folder / "summary.json").read_text())


def told(summary: dict) -> str:
    return "; ".join(f"{'ok' if one['passed'] else 'FAILED'} {one['text']}" for one in summary["outcomes"])


@pytest.mark.long
def test_three_honest_validators_agree_and_all_of_them_pay(tmp_path: Path) -> None:
    _, summary = run_localnet(tmp_path / "run", "--windows", "4")
    passed = {one["name"] for one in summary["outcomes"] if one["passed"]}
    # Other tests check learning and lateness, which so few windows on a busy machine can't show.
    assert passed >= {"windows", "agreement", "included sets", "weights"}, told(summary)
    assert len(summary["weights"]) == 3


@pytest.mark.long
@pytest.mark.parametrize("role", ["leader", "minority-validator", "aggregator"])
def test_one_that_lies_stops_nobody_and_misleads_nobody(tmp_path: Path, role: Byzantine) -> None:
    options = ("--windows", str(WINDOWS), "--window-seconds", SECONDS, "--byzantine", role)
    status, summary = run_localnet(tmp_path / "run", *options)
    assert status == 0, told(summary)
    assert {one["name"] for one in summary["outcomes"]} >= {"windows", "agreement", "weights", "progress", "attacks"}


@pytest.mark.long
async def test_who_comes_back_with_nothing_takes_no_checkpoint_of_a_lying_leader(tmp_path: Path) -> None:
    """All its checkpoints are complete, but contain NaN."""
    options = {"miners": 2, "validators": 3, "byzantine": "leader", "window_seconds": float(SECONDS)}
    plan = make_plan(**options, windows=WINDOWS, run_dir=tmp_path / "run", cache=CACHE)
    async with Localnet(plan) as net:
        victim, witness = net.nodes["miner-2"], net.view.nodes["miner-1"]
        await net.wait_until(lambda view: view.nodes["validator"].attacks["nan-checkpoint"] > 0, timeout=240)
        victim.kill()
        (state,) = (net.network.folder / "state").glob("*-miner-2-*")
        shutil.rmtree(state)
        newest = witness.window or 0
        victim.start()
        view = await net.wait_until(lambda _: (net.view.nodes["miner-2"].window or 0) > newest + 2, timeout=180)
        assert view.disagreements() == {}
        assert summarize(view, {}, windows=view.completed).differing_windows == ()
        assert "by uid 0 restored" not in victim.log.read_text()


@pytest.mark.long
def test_faults_do_not_part_three_validators(tmp_path: Path) -> None:
    status, summary = run_localnet(tmp_path / "run", "--windows", "20", "--chaos")
    assert status == 0, told(summary)
