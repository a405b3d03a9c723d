"""A chaos script contains every fault, and follows from the seed."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tplr.config import KILL_AT
from tplr.errors import ConfigError
from tplr.localnet.chaos import QUIET_WINDOWS, SKEWED, VALIDATOR_FAILPOINTS, Chaos, Script, write_script
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.node.failpoints import FAILPOINTS

ROLES = {"validator": "validator", **{f"miner-{number}": "miner" for number in range(1, 5)}, "aggregator": "aggregator"}


def script(seed=1, windows=50):
    return write_script(ROLES, windows=windows, window_seconds=10.0, seed=seed)


def test_every_named_step_ends_somebody_and_everything_else_happens():
    found = script()
    ended = {one.partition(":")[0] for failpoints in found.failpoints.values() for one in failpoints}
    assert ended == set(FAILPOINTS)
    assert {action.kind for action in found.actions} == {"kill", "pause", "storage", "chain", "garbage", "skew"}
    assert all(0 < action.window < 50 - QUIET_WINDOWS for action in found.actions)
    windows = [action.window for action in found.actions]
    assert windows == sorted(windows)


def test_every_validator_of_several_is_ended_somewhere_and_any_may_be_suspended():
    roles = {**ROLES, "validator-2": "validator", "validator-3": "validator"}
    scripts = [write_script(roles, windows=50, window_seconds=10.0, seed=seed) for seed in range(20)]
    for found in scripts:
        ended = {one.partition(":")[0] for failpoints in found.failpoints.values() for one in failpoints}
        assert ended == set(FAILPOINTS)
        each, more = divmod(len(VALIDATOR_FAILPOINTS), 3)
        counts = sorted(len(found.failpoints[name]) for name in roles if roles[name] == "validator")
        assert counts == [each] * (3 - more) + [each + 1] * more
    suspended = {action.node for found in scripts for action in found.actions if action.kind == "pause"}
    assert suspended >= {"validator", "validator-2", "validator-3"}


def test_it_follows_from_the_seed():
    assert script(1) == script(1)
    assert script(1) != script(2)


def test_too_short_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--windows 19: expected at least 20 with --chaos"):
        make_plan(windows=19, chaos=True)
    assert make_plan(windows=20, chaos=True).chaos


def test_a_failpoint_ends_the_process_when_it_is_passed_so_often():
    code = (
        "import asyncio\n"
        "from tplr.node.failpoints import KillAt, failpoint, hook\n"
        "hook.set(KillAt('packed:3'))\n"
        "for number in range(9):\n"
        "    asyncio.run(failpoint('packed')); print(number, flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "0\n1\n")


def test_a_skewed_process_has_another_wall_clock(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SKEWED.format(skew=-150.0))
    code = "import time, os; print(time.time() - os.stat('.').st_atime < -100)"
    child = Child("child", [sys.executable, "-c", code], env={}, folder=tmp_path, log=tmp_path / "log")
    os.utime(tmp_path)
    child.start({"PYTHONPATH": str(tmp_path)})
    child._process.wait()
    assert child.log.read_text() == "True\n"


async def test_a_step_counts_once_somebody_ended_there_and_not_before(tmp_path, monkeypatch):
    monkeypatch.setattr("tplr.localnet.chaos.RESTART_SECONDS", 0.0)
    life = f'echo "${KILL_AT}"; [ -e tried ] || {{ touch tried; exit 2; }}; [ -z "${KILL_AT}" ] || kill -9 $$; sleep 60'
    child = Child("miner-1", ["/bin/sh", "-c", life], env=dict(os.environ), folder=tmp_path, log=tmp_path / "log")
    net = SimpleNamespace(nodes={"miner-1": child}, view=SimpleNamespace(furthest=5))
    chaos = Chaos(net, Script((), {"miner-1": ("packed:2", "saved:1")}))
    keeping = asyncio.create_task(chaos._keep_alive("miner-1", 0))
    async with asyncio.timeout(20):
        while chaos.done.total() < 2 or not child.running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    keeping.cancel()
    child.kill()
    assert chaos.done == {"miner-1 killed at packed": 1, "miner-1 killed at saved": 1}
    # Its first start failed.
    assert child.log.read_text().split() == ["packed:2", "packed:2", "saved:1"]


async def test_the_last_windows_without_faults_begin_when_all_nodes_have_caught_up(monkeypatch):
    """After an outage, windows pass at once, in which nothing was trained."""
    monkeypatch.setattr("tplr.localnet.chaos.POLL_SECONDS", 0.001)

    async def window() -> int:
        return 30

    nodes = [SimpleNamespace(window=12), SimpleNamespace(window=None)]
    view = SimpleNamespace(furthest=9, completed=8, honest=nodes)
    net = SimpleNamespace(nodes={}, view=view, plan=SimpleNamespace(windows=20), window=window)
    chaos = Chaos(net, Script((), {}))
    running = asyncio.create_task(chaos._run())
    nodes[0].window = 30
    await asyncio.sleep(0.05)
    view.completed = 26  # of an outage of 18 windows; one node is not there yet
    assert not running.done()
    assert not chaos.over
    nodes[1].window = 31
    await asyncio.wait_for(running, 5)
    assert chaos.quiet_from == 26
    view.completed = 26 + QUIET_WINDOWS - 1
    assert not chaos.over
    view.completed += 1
    assert chaos.over
