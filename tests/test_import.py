"""Importing the package costs nobody anything: no environment, no network, no wallet, no heavy SDK."""

import subprocess
import sys

import pytest

# Fails where an import opens a connection, looks a name up, or reads a wallet or settings from home.
CODE = """
import builtins, io, socket, sys

def refuse(*arguments, **more):
    raise AssertionError(f"an import asked for {arguments}")

socket.socket.connect = socket.getaddrinfo = refuse
really_open = io.open

def watched_open(file, *arguments, **more):
    if ".bittensor" in str(file) or str(file).endswith(".env"):
        refuse(file)
    return really_open(file, *arguments, **more)

builtins.open = io.open = watched_open
import MODULE
foreign = {"bittensor", "bittensor_core"} & set(sys.modules)
assert not foreign, foreign
"""
MODULES = ["tplr", "tplr.chain", "tplr.chain.local", "tplr.comms", "tplr.node.miner", "tplr.cli"]


@pytest.mark.parametrize("module", MODULES)
def test_an_import_needs_nothing(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("MODULE", module)],
        env={"HOME": "/no-such-home", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_package_itself_does_not_import_torch():
    code = "import sys, tplr; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
