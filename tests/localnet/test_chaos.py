"""The script of a chaos: what must happen does, and follows from the seed."""

import os
import signal
import subprocess
import sys

import pytest

from tplr.errors import ConfigError
from tplr.localnet.chaos import QUIET_WINDOWS, SKEWED, write_script
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.node.steps import KILL_AT, STEPS

ROLES = {"validator": "validator", **{f"miner-{number}": "miner" for number in range(1, 5)}, "aggregator": "aggregator"}


def script(seed=1, windows=50):
    return write_script(ROLES, windows=windows, window_seconds=10.0, seed=seed)


def test_every_named_step_ends_somebody_and_everything_else_happens():
    found = script()
    ended = {fuse.partition(":")[0] for fuses in found.fuses.values() for fuse in fuses}
    assert ended == set(STEPS)
    assert {deed.kind for deed in found.deeds} == {"kill", "pause", "storage", "chain", "garbage", "skew"}
    assert all(0 < deed.window < 50 - QUIET_WINDOWS for deed in found.deeds)
    windows = [deed.window for deed in found.deeds]
    assert windows == sorted(windows)


def test_it_follows_from_the_seed():
    assert script(1) == script(1)
    assert script(1) != script(2)


def test_too_short_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--windows 15: expected at least 16 with --chaos"):
        make_plan(windows=15, chaos=True)
    assert make_plan(windows=16, chaos=True).chaos


def test_a_fuse_ends_the_process_at_that_passing_of_its_step():
    code = (
        "import asyncio\n"
        "from tplr.node.steps import reached\n"
        "for number in range(9):\n"
        "    asyncio.run(reached('packed')); print(number, flush=True)\n"
    )
    environment = {**os.environ, KILL_AT: "packed:3"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "0\n1\n")


def test_a_skewed_process_has_another_wall_clock(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SKEWED.format(skew=-150.0))
    code = "import time, os; print(time.time() - os.stat('.').st_atime < -100)"
    child = Child("child", [sys.executable, "-c", code], env={}, folder=tmp_path, log=tmp_path / "log")
    os.utime(tmp_path)
    child.start({"PYTHONPATH": str(tmp_path)})
    child._process.wait()
    assert child.log.read_text() == "True\n"
