"""Importing the package has no side effects: no environment, no network, no wallet, no heavy SDK, no extra."""

import subprocess
import sys
from importlib import metadata

import pytest

import tplr

# Fails if an import opens a connection, looks up a host name, or reads a wallet or settings from home.
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
from importlib import import_module
for module in sys.argv[1:]:
    import_module(module)
    # ``bittensor_core`` alone, which verifies signatures, is one compiled module, and takes milliseconds.
    # All others are of extras.
    loaded = {"bittensor", "h5py", "matplotlib", "wandb", "ray", "boto3", "botocore"} & set(sys.modules)
    assert not loaded, (module, loaded)
"""
# Each imports more than the previous ones, so one process tests all.
MODULES = [
    "tplr",
    "tplr.cli",
    "tplr.chain",
    "tplr.chain.local",
    "tplr.chain.connect",
    "tplr.chain.hotkeys",
    "tplr.exchange.envelope",
    "tplr.comms",
    "tplr.data",
    "tplr.stores.factory",
    "tplr.stores.preprocess.pipeline",
    "tplr.node.miner",
    "tplr.node.validator",
    "tplr.node.startup",
]


def test_an_import_needs_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, *MODULES],
        env={"HOME": "/no-such-home", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_package_itself_imports_nothing_heavy():
    code = """
import sys, tplr
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"torch", "transformers", "numpy", "pyarrow", "pydantic", "aiohttp"}, loaded
assert not [name for name in sys.modules if name.startswith("tplr.")]
assert {"Comms", "R2DatasetLoader", "load_hparams", "__version__"} <= set(dir(tplr))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_offers_its_main_names():
    from tplr.comms import Comms
    from tplr.hparams import load_hparams
    from tplr.r2_dataset import R2DatasetLoader

    assert (tplr.Comms, tplr.R2DatasetLoader, tplr.load_hparams) == (Comms, R2DatasetLoader, load_hparams)
    assert tplr.__version__ == metadata.version("tplr")
    with pytest.raises(AttributeError, match="module 'tplr' has no attribute 'Coms'"):
        _ = tplr.Coms  # type: ignore[attr-defined]
