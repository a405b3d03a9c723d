"""Saved state: two generations, torn ones passed over, nothing executed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tplr.errors import StateError
from tplr.node.state import NAMES, StateFolder


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3, 4), value), "momentum.a": torch.arange(5).float() * value}


def test_newest_generation_comes_back(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.load() is None
    for window in (7, 8, 9):
        folder.save(window, tensors(window), {"note": [window]})
    loaded = StateFolder(tmp_path).load()
    assert loaded is not None
    assert (loaded.window, loaded.values) == (9, {"note": [9]})
    for name, tensor in tensors(9).items():
        assert torch.equal(loaded.tensors[name], tensor)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "pickle", "version"])
def test_damaged_generation_is_passed_over_and_replaced(tmp_path: Path, damage: str) -> None:
    folder = StateFolder(tmp_path)
    folder.save(8, tensors(8), {})
    folder.save(9, tensors(9), {})
    newest = tmp_path / NAMES[1]
    data = newest.read_bytes()
    if damage == "cut":
        newest.write_bytes(data[:-1])
    elif damage == "flip":
        newest.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif damage == "empty":
        newest.write_bytes(b"")
    elif damage == "pickle":
        torch.save({"window": 9}, newest)
    else:
        import hashlib

        newest.write_bytes(hashlib.sha256(b"\x02\0\0\0\0\0\0\0{}").digest() + b"\x02\0\0\0\0\0\0\0{}")
    again = StateFolder(tmp_path)
    loaded = again.load()
    assert loaded is not None
    assert loaded.window == 8
    again.save(10, tensors(10), {})  # over the damaged one, not over the only whole one
    newest.write_bytes(b"")
    loaded = StateFolder(tmp_path).load()
    assert loaded is not None
    assert loaded.window == 8


def test_killed_while_saving_loses_one_generation_at_most(tmp_path: Path) -> None:
    code = """
import os, signal, sys, torch
from pathlib import Path
from tplr.node.state import StateFolder
folder = StateFolder(Path(sys.argv[1]))
folder.save(1, {"a": torch.ones(9)}, {})
real = os.fsync
def die(descriptor): os.kill(os.getpid(), signal.SIGKILL)
folder.save(2, {"a": torch.ones(9)}, {})
os.fsync = die
folder.save(3, {"a": torch.ones(9)}, {})
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    loaded = StateFolder(tmp_path).load()
    assert loaded is not None
    assert loaded.window == 2
    assert list(tmp_path.glob("*.tmp")) == []


def test_full_disk_keeps_the_older_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    folder = StateFolder(tmp_path)
    folder.save(8, tensors(8), {})
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (tmp_path / f"{NAMES[1]}.{os.getpid()}-0.tmp").symlink_to("/dev/full")
    with pytest.raises(StateError, match="the disk is full"):
        folder.save(9, tensors(9), {})
    loaded = StateFolder(tmp_path).load()
    assert loaded is not None
    assert loaded.window == 8
