"""Memory and processor time of processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tplr.localnet.usage import Usage, read_usage, write_usage

BUSY = """
data = bytearray(64 * 2**20)
import time
while time.process_time() < 0.2:
    pass
print("up", flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts shared pages")
def test_of_a_process_that_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (one,) = read_usage({"busy": child.pid, "ended": 2**22 + 1}, windows=3)
        child.kill()
    assert (one.name, one.windows) == ("busy", 3)
    assert 64 * 2**20 < one.uss <= one.pss <= one.rss < 256 * 2**20
    assert 0.1 <= one.cpu < 20


def test_it_is_a_table(tmp_path: Path) -> None:
    write_usage(tmp_path / "usage.csv", [Usage(1, "miner-1", 30, 20, 10, 0.5)])
    assert (tmp_path / "usage.csv").read_text() == "windows,name,rss,pss,uss,cpu\n1,miner-1,30,20,10,0.5\n"
