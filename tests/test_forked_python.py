"""A command in a fork ends as in a new interpreter, and with the process that asked for it."""

import signal
import subprocess

import pytest
from forked_python import interpreter
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


def test_it_ends_with_the_process_that_asked_for_it() -> None:
    with subprocess.Popen([*interpreter(), "-c", SLEEP], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_ended(pid)
