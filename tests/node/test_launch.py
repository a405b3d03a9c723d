"""A node of several processes ends with the exit status that its service manager needs."""

import subprocess

import pytest
from forked import unframed
from guides import from_guide

from tplr.node.checks import MISCONFIGURED


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_misconfigured_node_of_two_processes_says_so_by_its_status(tmp_path) -> None:
    command = from_guide(
        "docs/miner.md",
        ".venv/bin/tplr miner --ranks 4 --wallet.name NAME --wallet.hotkey HOTKEY",
        {"4": 2, "NAME": "nobody", "HOTKEY": "none"},
    )
    done = subprocess.run(
        [*command.process, "--device", "cpu", "--subtensor.network", "local:none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == MISCONFIGURED, done.stderr
    assert "check --wallet.path, --wallet.name, --wallet.hotkey" in unframed(done.stderr)
