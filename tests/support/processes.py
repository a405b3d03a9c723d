"""Whether processes run, by their ids."""

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(*pids: int, seconds: float = 30.0) -> None:
    """Wait until none of the processes runs; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while running := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"processes {running} still run"
        time.sleep(0.02)
