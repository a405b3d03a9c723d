"""An error ends a command in one line and status 2; only a broken pipe of standard output ends it in silence."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tplr.cli.reported import FAILED, run_reported
from tplr.errors import ConfigError

# A command that writes to this file descriptor, at once or in a task group.
WRITE = """
import asyncio, os, sys
from tplr.cli import main
from tplr.cli.data import peek

async def in_group(output):
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(os.write, output, b"text"))

output, grouped = int(sys.argv[1]), sys.argv[2] == "grouped"
peek.run = lambda _: asyncio.run(in_group(output)) if grouped else os.write(output, b"text")
sys.exit(main(["data", "peek", "texts.jsonl"]))
"""


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def written(output: int, how: str, stdout: int, *inherited: int) -> tuple[int, str]:
    """Return exit status and standard error of ``WRITE``."""
    command = [sys.executable, "-c", WRITE, str(output), how]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, pass_fds=inherited, text=True, check=False, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("how", ["alone", "grouped"])
def test_a_broken_pipe_of_standard_output_ends_a_command_in_silence(unread: int, how: str) -> None:
    assert written(1, how, unread) == (141, "")


@pytest.mark.parametrize("how", ["alone", "grouped"])
def test_another_broken_pipe_is_one_line(unread: int, how: str) -> None:
    """Such as of a socket, or of the standard input of another process."""
    assert written(unread, how, subprocess.PIPE, unread) == (FAILED, "tplr data peek: [Errno 32] Broken pipe\n")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Returns the status of a command that an error ended, and the reported lines."""
    monkeypatch.setattr("tplr.cli.reported.setup_logging", lambda **_: None)  # logging settings would outlive the test

    def run(error: Exception) -> tuple[int, list[str]]:
        def fail() -> int:
            raise error

        lines: list[str] = []
        return run_reported(fail, report=lines.append), lines

    return run


@pytest.mark.parametrize("error", [ConfigError("no bucket"), OSError("no bucket")])
def test_an_error_of_several_reads_is_reported_like_that_of_one(failing, error: Exception) -> None:
    assert failing(error) == failing(ExceptionGroup("reads", [ExceptionGroup("more", [error])]))
    assert failing(error) == (FAILED, ["no bucket"])


@pytest.mark.parametrize("error", [ValueError("a defect"), ExceptionGroup("reads", [ValueError("a defect")])])
def test_a_defect_keeps_its_traceback(failing, error: Exception) -> None:
    with pytest.raises(type(error)) as found:
        failing(error)
    assert found.value is error
