"""Saved state: several generations are kept, torn ones are skipped, nothing in them is executed."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import interpreter
from snapshots import save as save_snapshot

from tplr.errors import StateError
from tplr.exchange import snapshot
from tplr.exchange.snapshot import MANIFEST, ShardWriter
from tplr.node.state import SavedState, StateFolder


def groups(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"a": torch.full((3, 4), value)}, "outer": {"feedback.a": torch.arange(5).float() * value}}


def save(folder: StateFolder, window: int, **values: Any) -> SavedState:
    position = {"window": window, "start_window": 3, "global_step": window - 4}
    return save_snapshot(folder, **position, groups=groups(float(window)), values={"note": [window], **values})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_generation_comes_back(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.load() is None
    for window in (7, 8, 10):
        save(folder, window)
    assert names(tmp_path) == ["window-10", "window-8"]
    loaded = StateFolder(tmp_path).load()
    assert loaded is not None
    assert (loaded.window, loaded.manifest.global_step, loaded.values) == (10, 6, {"note": [10]})
    for group, tensors in groups(10).items():
        found = loaded.tensors(group)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    target = torch.zeros(3, 4)
    loaded.read_into("model", {"a": target})
    assert torch.equal(target, groups(10)["model"]["a"])


def test_generations_can_be_held_and_later_ones_forgotten(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for window in (7, 8):
        save(folder, window)
    folder.held.add(7)
    save(folder, 9)
    assert names(tmp_path) == ["window-7", "window-8", "window-9"]
    folder.held.clear()
    folder.forget_after(7)
    assert names(tmp_path) == ["window-7"]
    found = folder.load()
    assert found is not None
    assert found.window == 7


def test_states_of_another_run_are_passed_over_and_replaced_by_the_next_saves(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for window in (100, 101):
        save(folder, window, run={"of": "before"})
    assert folder.load(run={"of": "now"}) is None
    save(folder, 11, run={"of": "now"})
    assert names(tmp_path) == ["window-101", "window-11"]  # after a wrong folder, the old run can still continue
    found = StateFolder(tmp_path).load(run={"of": "now"})
    assert found is not None
    assert found.window == 11
    save(folder, 12, run={"of": "now"})
    assert names(tmp_path) == ["window-11", "window-12"]


def test_damaged_states_of_later_windows_do_not_remove_the_next_ones(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for window in (20, 21):
        (save(folder, window).folder / MANIFEST).write_bytes(b"{}")
    for window in (11, 12):
        assert (save(folder, window).folder / MANIFEST).exists()
    found = StateFolder(tmp_path).load()
    assert found is not None
    assert found.window == 12
    assert names(tmp_path) == ["window-11", "window-12"]


@pytest.mark.parametrize(
    "damage", ["cut", "flip", "empty", "pickle", "manifest", "wrong number", "no manifest", "other window"]
)
def test_damaged_generation_is_passed_over_and_replaced(tmp_path: Path, damage: str) -> None:
    folder = StateFolder(tmp_path)
    save(folder, 8)
    place = save(folder, 9).folder
    shard = sorted(place.glob("shard-*"))[0]
    data = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "flip":
        shard.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "pickle":
        torch.save({"window": 9}, shard)
    elif damage == "manifest":
        (place / MANIFEST).write_bytes((place / MANIFEST).read_bytes()[:-1])
    elif damage == "wrong number":
        body = (place / MANIFEST).read_bytes()
        assert body.count(b'"note":[9]') == 1
        (place / MANIFEST).write_bytes(body.replace(b'"note":[9]', b'"note":[8]'))
    elif damage == "no manifest":
        (place / MANIFEST).unlink()
    else:
        place.rename(tmp_path / "window-12")
    again = StateFolder(tmp_path)
    loaded = again.load()
    assert loaded is not None
    assert loaded.window == 8
    save(again, 9)
    loaded = StateFolder(tmp_path).load()
    assert loaded is not None
    assert loaded.window == 9


def test_another_process_s_folder_is_only_read(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for window in (5, 7):
        save(folder, window)
    unfinished = tmp_path / "window-9"
    unfinished.mkdir()
    found = [folder.load(until=until, clean=False) for until in (9, 7, 6, 4)]
    assert [one and one.window for one in found] == [7, 7, 5, None]
    assert unfinished.exists()
    folder.load()
    assert not unfinished.exists()


def test_killed_while_saving_loses_one_generation_at_most(tmp_path: Path) -> None:
    code = """
import os, signal, sys, torch
from pathlib import Path
from snapshots import save
from tplr.node.state import StateFolder
folder = StateFolder(Path(sys.argv[1]))
groups = {"model": {"a": torch.ones(9)}, "outer": {"a": torch.ones(9)}}
save(folder, window=1, groups=groups)
save(folder, window=2, groups=groups)
real, calls = os.fsync, 0
def die(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = die
save(folder, window=3, groups=groups)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for call in (1, 3):
        place = tmp_path / str(call)
        command = [*interpreter(), "-c", code, str(place), str(call)]
        assert subprocess.run(command, check=False, env=environment).returncode == -9
        assert (place / "window-3").exists()
        loaded = StateFolder(place).load()
        assert loaded is not None
        assert loaded.window == 2
        assert names(place) == ["window-1", "window-2"]


def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes no further folder of a snapshot."""
    make = Path.mkdir

    def refused(path: Path, *args: Any, **options: Any) -> None:
        if path.name.startswith("window-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refused)


def test_disk_without_room_for_a_folder_keeps_the_older_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path)
    save(folder, 8)
    unwritable(monkeypatch)
    with pytest.raises(StateError, match="the disk is full"):
        save(folder, 9)
    assert names(tmp_path) == ["window-8"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), RuntimeError("a copy failed")])
def test_a_failed_write_is_raised_by_finish_and_older_generations_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    folder = StateFolder(tmp_path)
    for window in (7, 8):
        save(folder, window)
    monkeypatch.setattr(ShardWriter, "write", fails)
    for window in (9, 10):
        draft = folder.begin(window=window, start_window=3, global_step=5, version="1", groups=groups(1.0), values={})
        thread = threading.Thread(target=draft.write)  # like a save during training
        thread.start()
        thread.join()
        with pytest.raises(StateError, match=str(error.args[-1])):
            folder.finish(draft)
    assert names(tmp_path) == ["window-7", "window-8"]


def test_a_snapshot_without_all_rows_is_not_finished(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    save(folder, 8)
    draft = folder.begin(window=9, start_window=3, global_step=5, version="1", groups=groups(1.0), values={})
    with pytest.raises(StateError, match="pieces of 0 rows"):  # ``write`` was not called
        folder.finish(draft)
    assert names(tmp_path) == ["window-8"]


def test_a_manifest_that_no_start_would_read_replaces_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_MANIFEST_BYTES", 2**13)
    folder = StateFolder(tmp_path)
    for window in (7, 8):
        save(folder, window)
    for window in (9, 10):
        with pytest.raises(StateError, match="bytes, a manifest has at most 8192"):
            save(folder, window, evidence="x" * 2**13)
    assert names(tmp_path) == ["window-7", "window-8"]
    found = folder.load()
    assert found is not None
    assert found.window == 8


def test_a_manifest_that_cannot_be_read_is_passed_over_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path)
    for window in (8, 9):
        save(folder, window)
    read = Path.read_bytes

    def unreadable(path: Path) -> bytes:
        if path.parent.name == "window-9":
            raise OSError(errno.EIO, "I/O error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", unreadable)
    found = folder.load()
    assert found is not None
    assert found.window == 8
    assert names(tmp_path) == ["window-8", "window-9"]


def test_full_disk_keeps_the_older_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StateFolder(tmp_path)
    save(folder, 8)
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    place = tmp_path / "window-9"
    full = place / f"shard-00000-00001.safetensors.{os.getpid()}-0.tmp"

    def make_folder(path: Path, **options: bool) -> None:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        if path == place and not full.is_symlink():
            full.symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", make_folder)
    with pytest.raises(StateError, match="the disk is full"):
        save(folder, 9)
    assert names(tmp_path) == ["window-8"]
    loaded = folder.load()
    assert loaded is not None
    assert loaded.window == 8
