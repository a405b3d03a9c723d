"""Child processes of a new interpreter and of a fork server, ended in every possible way."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from processes import alive

from tplr.errors import LocalnetError
from tplr.localnet import process
from tplr.localnet.fork_server import ForkServer
from tplr.localnet.process import Child

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    one = ForkServer(env={**os.environ, "PYTHONUNBUFFERED": "1"}, folder=folder, log=folder / "log", preloaded=())
    one.open()
    one.wait_until_ready()
    yield one
    one.close()


@pytest.fixture(
    params=["new", pytest.param("forked", marks=pytest.mark.skipif(sys.platform != "linux", reason="fork"))]
)
def make(tmp_path, request):
    made = []
    forks = request.getfixturevalue("server") if request.param == "forked" else None

    def child(code, **env):
        command, log = [sys.executable, "-c", code], tmp_path / "logs" / "child"
        made.append(Child("child", command, env=env, folder=tmp_path, log=log, server=forks))
        return made[-1]

    yield child
    for one in made:
        one.kill()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_child_runs_with_its_own_environment_and_folder(make, tmp_path):
    child = make("import os; print(os.environ.get('A'), 'HOME' in os.environ, os.getcwd())", A="1")
    child.start()
    await until(lambda: not child.running)
    assert child.log.read_text() == f"1 False {tmp_path}\n"


async def test_stop_lets_it_finish(make):
    child = make(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "for _ in range(600): time.sleep(0.1)"  # a signal just before one long sleep would be handled only after it
    )
    child.start()
    await until(lambda: child.log.read_text() == "up\n")  # text and line end may be two writes
    assert await child.stop() == 0
    assert child.log.read_text() == "up\nbye\n"
    child.check()  # it was stopped


async def test_what_does_not_stop_is_killed(make, monkeypatch):
    monkeypatch.setattr(process, "STOP_SECONDS", 0.2)
    child = make("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEP)
    child.start()
    await until(lambda: "up" in child.log.read_text())
    assert await child.stop() == -signal.SIGKILL


async def test_cancelling_a_stop_leaves_nothing_behind_and_does_not_wait(make, monkeypatch):
    monkeypatch.setattr(process, "STOP_SECONDS", 3600)
    child = make("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEP)
    child.start()
    await until(lambda: "up" in child.log.read_text())
    stopping = asyncio.ensure_future(child.stop())
    await asyncio.sleep(0.1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not child.running


async def test_a_killed_child_restarts_and_appends_to_its_log(make):
    child = make(SLEEP)
    child.start()
    first = child.pid
    await until(lambda: child.log.read_text() == "up\n")
    child.kill()
    assert not child.running
    child.check()  # killed on purpose
    child.kill()  # nothing to do
    child.start()
    await until(lambda: child.log.read_text() == "up\nup\n")
    assert child.pid != first
    with pytest.raises(RuntimeError, match="already running"):
        child.start()


async def test_a_child_that_was_never_started(make):
    child = make(SLEEP)
    assert not child.running
    assert await child.stop() is None
    child.check()


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import sys; print('first\\nlast words'); sys.exit(3)", "with status 3"),
        ("print('first\\nlast words')", "with status 0"),
        ("import os; print('last words', flush=True); os.kill(os.getpid(), 9)", "by SIGKILL"),
    ],
)
async def test_an_unexpected_end_is_an_error_with_the_end_of_the_log(make, code, how):
    child = make(code)
    child.start()
    await until(lambda: not child.running)
    with pytest.raises(LocalnetError, match=f"child ended unexpectedly {how}") as raised:
        child.check()
    assert "last words" in str(raised.value)


async def test_only_the_end_of_a_long_log_is_shown(make):
    child = make("for i in range(5000): print('line', i)\nraise SystemExit(1)")
    child.start()
    await until(lambda: not child.running)
    lines = child.log_tail().splitlines()
    assert (len(lines), lines[-1].strip()) == (process.TAIL_LINES, "line 4999")


async def test_ctrl_c_in_a_terminal_does_not_reach_it(make):
    child = make(SLEEP)
    child.start()
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
async def test_children_die_with_a_supervisor_that_is_killed(tmp_path):
    supervisor = (
        "import sys, time; from pathlib import Path; from tplr.localnet.process import Child\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"child = Child('child', [sys.executable, '-c', {SLEEP!r}], env={{}}, folder=folder, log=folder / 'log')\n"
        "child.start(); print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as parent:  # noqa: ASYNC220
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        log = tmp_path / "log"
        await until(lambda: log.exists() and "up" in log.read_text())
        assert alive(pid)
        parent.kill()
    await until(lambda: not alive(pid))


def test_a_launcher_whose_parent_is_gone_starts_nothing(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, str(process.LAUNCH), "1", sys.executable, "-c", f"open({str(done)!r}, 'w')"]
    if os.getpid() == 1:
        pytest.skip("our own process is number 1")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "the parent process has ended" in ended.stderr
    assert not done.exists()
