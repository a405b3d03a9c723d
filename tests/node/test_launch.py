"""A node of several processes ends with the exit status that its service manager acts on."""

import subprocess
import sys

import pytest

from tplr.node.checks import MISCONFIGURED


@pytest.mark.timeout(240)
def test_a_misconfigured_node_of_two_processes_says_so_by_its_status(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tplr.cli", "aggregator", "--ranks", "2", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == MISCONFIGURED, done.stderr
    assert "an aggregator is one process" in done.stderr
