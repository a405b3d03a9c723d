"""A file is complete or absent, for any failure during the write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tplr.errors import ConfigError, StateError
from tplr.files import atomic_folder, atomic_write, atomic_writer, check_outputs


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")
    with pytest.raises(UnicodeEncodeError), atomic_writer(path) as file:
        file.writelines([b"half of the ne", "\ud800".encode()])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")
    # The kernel's full device, at the name of the temporary file.
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (tmp_path / f"state.{os.getpid()}-0.tmp").symlink_to("/dev/full")
    with pytest.raises(StateError, match=r"can't write .*state: the disk is full"):
        atomic_write(path, b"new" * 100_000)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="can't write"):
        atomic_write(tmp_path / "file" / "state", b"new")


def test_outputs_of_long_work_are_checked_before_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    check_outputs({"--out": tmp_path / "new" / "folder" / "out", "--json": file, "--history": None})
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError) as caught:
        check_outputs({"--out": file / "out", "--json": tmp_path, "--history": tmp_path / "history"})
    assert str(caught.value).splitlines() == [
        f"--out {file / 'out'}: {file} is a file; give another path",
        f"--json {tmp_path}: is a folder; give another path",
    ]


def test_what_must_be_writable_depends_on_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_bytes(b"")
    folder.mkdir()
    forbidden = {tmp_path}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in forbidden)  # root may write everywhere
    check_outputs({"--out": folder / "new"})
    check_outputs({"--record": file}, "appended file")
    with pytest.raises(ConfigError, match=f"--out {file}: {tmp_path} is not writable"):
        check_outputs({"--out": file})
    with pytest.raises(ConfigError, match=f"--out {folder}: {tmp_path} is not writable"):
        check_outputs({"--out": folder}, "folder")  # it is written beside, and renamed
    forbidden = {file}
    check_outputs({"--out": file})
    check_outputs({"--out": folder}, "folder")
    with pytest.raises(ConfigError, match=f"--record {file}: is not writable"):
        check_outputs({"--record": file}, "appended file")
    with pytest.raises(ConfigError, match=r"--out .*: File name too long"):
        check_outputs({"--out": tmp_path / ("x" * 300) / "out"})


def test_killed_midway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")
    code = (
        "import os, signal, sys; from pathlib import Path; from tplr.files import atomic_writer\n"
        "with atomic_writer(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert path.read_bytes() == b"old"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "inner" / "out"
    with atomic_folder(out) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("text")
        assert not out.exists()
    assert (out / "deep" / "file").read_text() == "text"
    with pytest.raises(UnicodeEncodeError), atomic_folder(tmp_path / "other") as folder:
        (folder / "file").write_text("half of it \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_is_synced_with_all_in_it_before_it_appears(tmp_path, monkeypatch):
    out, synced, sync = tmp_path / "out", [], os.fsync

    def record(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), (out / "deep" / "file").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_folder(out) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("text")
        (folder / "link").symlink_to("nowhere")
    drafts = [folder, folder / "deep", folder / "deep" / "file"]
    assert sorted(synced[:-1]) == [(path, False) for path in drafts]
    assert synced[-1] == (tmp_path, True)


def test_a_folder_that_holds_something_is_not_replaced(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(StateError, match="can't write"), atomic_folder(tmp_path) as folder:
        (folder / "file").write_text("text")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with atomic_folder(empty) as folder:
        (folder / "file").write_text("text")
    assert (empty / "file").read_text() == "text"
    with atomic_folder(empty, replace=True) as folder:
        (folder / "new").write_text("text")
        assert (empty / "file").exists()
    assert [path.name for path in empty.iterdir()] == ["new"]
