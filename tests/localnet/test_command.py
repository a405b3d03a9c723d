"""``tplr localnet`` as a command: invalid plans, and the files that a run leaves."""

import argparse
import json

from tplr.cli.localnet import CAN_NOT_START
from tplr.cli.localnet import run as run_command
from tplr.localnet.command import _write_results
from tplr.localnet.plan import add_arguments, make_plan
from tplr.localnet.summary import summarize


def test_every_problem_of_a_plan_is_shown_and_nothing_is_started(tmp_path, capsys) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run_dir = tmp_path / "run"
    arguments = parser.parse_args(["--miners", "0", "--windows", "0", "--run-dir", str(run_dir)])
    assert run_command(arguments) == CAN_NOT_START
    shown = capsys.readouterr().err
    assert "miners" in shown
    assert "windows" in shown
    assert not run_dir.exists()


def test_a_run_leaves_its_summary_and_its_pictures(run, tmp_path) -> None:
    run_dir = tmp_path / "run"
    plan = make_plan(run_dir=run_dir, miners=2, windows=10)
    run_dir.mkdir()
    view = run.view()
    summary = summarize(view, {0: {1: 0.25, 2: 0.75}}, windows=10)
    _write_results(plan, view, summary)
    assert json.loads((run_dir / "summary.json").read_bytes()) == json.loads(json.dumps(summary.to_json()))
    assert (run_dir / "loss.png").stat().st_size > 0
    assert "miner-2" in (run_dir / "live-view.svg").read_text()
