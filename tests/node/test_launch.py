"""A node of several processes ends with the exit status that its service manager needs."""

import subprocess

import pytest
from forked import unframed
from forked_python import interpreter
from guides import from_guide

from tplr.node import launch
from tplr.node.checks import MISCONFIGURED, OUTDATED, OUTSIDE_DOWN


@pytest.mark.parametrize(
    ("statuses", "status", "runs"),
    [
        ([launch.OK], launch.OK, 1),
        ([MISCONFIGURED], MISCONFIGURED, 1),
        ([OUTSIDE_DOWN], OUTSIDE_DOWN, 1),
        ([OUTDATED], OUTDATED, 1),
        ([launch.CRASHED, launch.OK], launch.OK, 2),
        ([launch.CRASHED, launch.CRASHED], launch.CRASHED, 2),
    ],
)
def test_only_a_crash_is_restarted_and_once(statuses, status, runs, monkeypatch) -> None:
    given = []

    def run_once(ranks: int, arguments: list[str]) -> int:
        given.append((ranks, arguments))
        return statuses[len(given) - 1]

    monkeypatch.setattr(launch, "run_once", run_once)
    assert launch.launch(2, ["miner"]) == status
    assert given == [(2, ["miner"])] * runs


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_misconfigured_node_of_two_processes_says_so_by_its_status(tmp_path) -> None:
    command = from_guide(
        "docs/miner.md",
        ".venv/bin/tplr miner --ranks 4 --wallet.name NAME --wallet.hotkey HOTKEY",
        {"4": 2, "NAME": "nobody", "HOTKEY": "none"},
    )
    done = subprocess.run(
        [*command.process, "--device", "cpu", "--subtensor.network", "local:none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == MISCONFIGURED, done.stderr
    assert "check --wallet.path, --wallet.name, --wallet.hotkey" in unframed(done.stderr)


def test_a_rank_imports_nothing_from_its_working_directory(tmp_path) -> None:
    """It is the folder of ``run.toml``, which may come from a stranger with other files beside it."""
    script, folder = tmp_path / "ranks.py", tmp_path / "node"
    script.write_text("import sys; from tplr.node.launch import run_once; sys.exit(run_once(2, ['--version']))\n")
    (folder / "tplr").mkdir(parents=True)
    (folder / "tplr/__init__.py").write_text("raise SystemExit(77)\n")
    done = subprocess.run([*interpreter(), script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == launch.OK, done.stderr
    assert done.stdout.count("tplr 0.1.0") == 2
