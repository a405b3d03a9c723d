"""Special properties of a folder store: file names, foreign files, several processes, a failing disk."""

import asyncio
import contextlib
import errno
import os
from pathlib import Path

import pytest

from tplr.errors import ObjectNotFound, StateError, StoreError, StoreUnavailable
from tplr.files import atomic_writer
from tplr.storage import DirectoryStore


async def test_objects_survive_their_store(tmp_path: Path) -> None:
    info = await DirectoryStore(tmp_path / "s").put("a/b", b"bytes\n{}\n", metadata={"n": "1"})
    again = DirectoryStore(tmp_path / "s")
    assert await again.get("a/b", max_bytes=99) == b"bytes\n{}\n"
    assert await again.head("a/b") == info


async def test_every_object_is_one_file_in_the_folder(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    for key in ["a", "a/b", "a%2Fb", "..x", "a.object"]:
        await store.put(key, key.encode())
    names = sorted(await asyncio.to_thread(os.listdir, tmp_path / "s"))
    assert names == ["..x.object", "a%252Fb.object", "a%2Fb.object", "a.object", "a.object.object"]
    assert [info.key for info in await store.list()] == ["..x", "a", "a%2Fb", "a.object", "a/b"]


async def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    await store.put("a" * 215, b"x")
    with pytest.raises(StoreError, match="215"):
        await store.put("a" * 216, b"x")


async def test_temporary_files_are_no_objects(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await store.put("k", b"x")
    (tmp_path / "k2.object.77-abcd.tmp").write_bytes(b"half")
    assert [info.key for info in await store.list()] == ["k"]


async def test_what_a_killed_process_left_goes_when_it_is_old(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(atomic_writer(tmp_path / "k.object")).write(b"half")
        (tmp_path / "other.tmp").touch()
        unfinished = stack.pop_all()
    assert await store.list() == []
    assert len(list(tmp_path.iterdir())) == 2  # another process may be writing it
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert await store.list() == []
    assert [path.name for path in tmp_path.iterdir()] == ["other.tmp"]
    with contextlib.suppress(StateError):
        unfinished.close()


async def test_foreign_files_are_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / "k.object").write_bytes(b"\xff not ours")
    with pytest.raises(StoreError, match="remove it"):
        await store.get("k", max_bytes=99)


async def test_an_open_object_stays_itself(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await store.put("k", b"old")
    info, file = store._open("k")
    with file:
        await store.put("k", b"newer")
        assert (info.size, file.read()) == (3, b"old")
    await store.delete("k")
    with pytest.raises(ObjectNotFound):
        await store.head("k")


async def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = DirectoryStore(tmp_path / "file")
    with pytest.raises(StoreUnavailable):
        await store.put("k", b"x")
    with pytest.raises(StoreUnavailable):
        await store.put("k", b"x", create_only=True)
    with pytest.raises(StoreUnavailable):
        await store.list()


async def test_a_full_disk_says_so_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "s")
    await store.put("k", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreUnavailable, match="disk full"):
            await store.put("k", b"new")
        with pytest.raises(StoreUnavailable, match="disk full"):
            await store.get_file("k", tmp_path / "target", max_bytes=9)
    assert await store.get("k", max_bytes=9) == b"old"
    assert await asyncio.to_thread(os.listdir, tmp_path) == ["s"]
    assert await asyncio.to_thread(os.listdir, tmp_path / "s") == ["k.object"]


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await store.put("k", b"abc")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"d")
    with pytest.raises(StoreUnavailable, match="damaged"):
        await store.get("k", max_bytes=3)
    assert await store.get("k", max_bytes=3, verify=False) == b"abd"
