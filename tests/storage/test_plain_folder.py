"""A folder as a read-only store."""

import os

import pytest

from tplr.errors import AccessDenied, ObjectNotFound, ObjectTooLarge, PreconditionFailed, StoreError, StoreUnavailable
from tplr.storage import PlainFolder
from tplr.storage.base import CHUNK_BYTES

LARGE = bytes(range(256)) * 5000  # more than a chunk


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "large").write_bytes(LARGE)
    (tmp_path / "a" / "0.txt").write_bytes(b"zero")
    (tmp_path / "a.txt").write_bytes(b"")
    return tmp_path


async def test_files_are_read_by_their_paths(folder):
    store = PlainFolder(folder)
    assert [(info.key, info.size) for info in await store.list()] == [
        ("a.txt", 0),
        ("a/0.txt", 4),
        ("a/b/large", len(LARGE)),
    ]
    assert [info.key for info in await store.list("a/", start_after="a/0.txt")] == ["a/b/large"]
    assert [info.key for info in await store.list(limit=1)] == ["a.txt"]
    assert await store.get("a/b/large", max_bytes=len(LARGE)) == LARGE
    assert await store.get("a/b/large", max_bytes=9, byte_range=(255, 258)) == b"\xff\x00\x01"
    assert await store.get("a.txt", max_bytes=0) == b""
    lengths: list[int] = []
    await store.receive("a/b/large", lambda piece: lengths.append(len(piece)), max_bytes=len(LARGE))
    assert lengths == [CHUNK_BYTES, len(LARGE) - CHUNK_BYTES]
    await store.get_file("a/b/large", folder / "copy", max_bytes=len(LARGE))
    assert (folder / "copy").read_bytes() == LARGE


async def test_what_is_not_there_or_not_as_asked_for_is_refused(folder):
    store = PlainFolder(folder)
    etag = (await store.head("a/0.txt")).etag
    for key in ("a", "b", "a/0.txt/c"):
        with pytest.raises(ObjectNotFound, match=key):
            await store.head(key)
    for key in ("../x", "/etc/passwd", ""):
        with pytest.raises(StoreError, match="object key"):
            await store.get(key, max_bytes=10)
    with pytest.raises(ObjectTooLarge):
        await store.get("a/0.txt", max_bytes=3)
    with pytest.raises(PreconditionFailed):
        await store.get("a/0.txt", max_bytes=9, byte_range=(0, 5))
    assert await store.get("a/0.txt", max_bytes=4, if_match=etag) == b"zero"
    os.utime(folder / "a" / "0.txt", ns=(1, 1))
    with pytest.raises(PreconditionFailed):
        await store.get("a/0.txt", max_bytes=4, if_match=etag)


async def test_a_file_that_becomes_shorter_is_not_taken_for_whole(folder):
    store = PlainFolder(folder)

    def shorten(_):
        os.truncate(folder / "a" / "b" / "large", CHUNK_BYTES + 1)

    with pytest.raises(StoreUnavailable, match="truncated"):
        await store.receive("a/b/large", shorten, max_bytes=len(LARGE))


async def test_nothing_is_changed(folder):
    store = PlainFolder(folder)
    for change in (store.put("x", b""), store.put_file("x", folder / "a.txt"), store.delete("a.txt")):
        with pytest.raises(AccessDenied, match="is read-only"):
            await change
    assert (folder / "a.txt").exists()
    assert not (folder / "x").exists()
