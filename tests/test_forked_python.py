"""A command in a fork ends as in a new interpreter, and with the process that asked for it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_python import interpreter, requested, server
from processes import wait_until_ended

SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(3)", 3), ("raise ValueError", 1), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_its_end_is_passed_on(code: str, status: int) -> None:
    done = subprocess.run([*interpreter(), "-c", code], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == status


def test_a_signal_is_passed_on() -> None:
    with subprocess.Popen([*interpreter(), "-c", SLEEP], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="no server of forks")
def test_it_ends_if_the_process_that_asked_for_it_ended_before_the_answer(tmp_path: Path) -> None:
    path = server()
    assert path is not None
    subprocess.run([*interpreter(path), "-c", ""], check=True)  # the server has imported everything
    with Path(os.devnull).open("r+") as nothing:
        requested(path, ["-c", SLEEP], env=os.environ, folder=tmp_path, streams=[nothing.fileno()] * 3).close()
    time.sleep(1)  # the fork may end as soon as it has begun
    pids = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
    wait_until_ended(*[pid for pid in pids if folder_of(pid) == tmp_path])


def folder_of(pid: int) -> Path | None:
    """Return the folder of a process; None if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cwd").readlink()
    return None


def test_it_ends_with_the_process_that_asked_for_it() -> None:
    with subprocess.Popen([*interpreter(), "-c", SLEEP], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_ended(pid)
