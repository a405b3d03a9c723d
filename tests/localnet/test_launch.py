"""A program started through ``tplr.localnet.launch`` ends with the process that started it."""

import os
import subprocess
import sys

import pytest
from processes import wait_until_ended

LAUNCH = [sys.executable, "-m", "tplr.localnet.launch"]
ECHO = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
# Starts a program that announces itself and then waits, prints its pid, and dies without a chance to clean up.
ORPHAN = """
import os, signal, subprocess, sys
program = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
child = subprocess.Popen([sys.executable, "-m", "tplr.localnet.launch", str(os.getpid()), *program],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_program_gets_its_arguments() -> None:
    command = [*LAUNCH, str(os.getpid()), *ECHO, "one", "two"]
    assert subprocess.check_output(command, text=True) == "['one', 'two']\n"


def test_a_program_whose_parent_is_gone_is_not_started() -> None:
    other = "2" if os.getpid() == 1 else "1"
    done = subprocess.run([*LAUNCH, other, *ECHO], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "launch: the parent process has ended\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_the_program_dies_with_a_killed_parent() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, check=False)
    wait_until_ended(int(done.stdout), seconds=60)
