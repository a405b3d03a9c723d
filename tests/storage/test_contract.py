"""One contract of every store: memory, a folder, S3 over moto and over a server with R2's rules."""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tplr.errors import ObjectNotFound, ObjectTooLarge, PreconditionFailed, StoreError
from tplr.storage import ObjectStore, S3Store, upload_stream
from tplr.storage.s3_response import S3Response

pytestmark = pytest.mark.asyncio(loop_scope="module")

# moto's threads share its objects without locks, so it can't be asked about races.
RACING = pytest.mark.parametrize("store", ["memory", "directory", "r2"], indirect=True)
BODY = bytes(range(256)) * 20


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


async def test_what_is_put_is_what_is_got_and_said(store: ObjectStore) -> None:
    before = time.time()
    put = await store.put("a-key", BODY, metadata={"sha256": "ab" * 32, "note": "two words"})
    head = await store.head("a-key")
    assert await store.get("a-key", max_bytes=len(BODY)) == BODY
    assert (head.key, head.size, head.etag) == ("a-key", len(BODY), md5(BODY))
    assert head.metadata == {"sha256": "ab" * 32, "note": "two words"}
    assert (put.key, put.size, put.etag, put.metadata) == (head.key, head.size, head.etag, head.metadata)
    assert head.last_modified == int(head.last_modified)
    assert before - 1 <= head.last_modified <= put.last_modified <= time.time()


async def test_an_empty_object(store: ObjectStore) -> None:
    await store.put("empty", b"", metadata={"sha256": "00"})
    head = await store.head("empty")
    assert (head.size, head.etag, head.metadata) == (0, md5(b""), {"sha256": "00"})
    assert await store.get("empty", max_bytes=0) == b""


async def test_a_content_type_is_what_a_browser_is_told(store: ObjectStore) -> None:
    await store.put("page", BODY, content_type="text/html; charset=utf-8")
    assert await store.get("page", max_bytes=len(BODY)) == BODY
    if isinstance(store, S3Store):
        response = S3Response(store.name, "page")
        await store.client.send("HEAD", response)
        assert response.headers["content-type"] == "text/html; charset=utf-8"


async def test_put_overwrites_data_and_metadata(store: ObjectStore) -> None:
    await store.put("k", b"first", metadata={"a": "1"})
    await store.put("k", b"2nd", metadata={"b": "2"})
    assert await store.get("k", max_bytes=10) == b"2nd"
    assert (await store.head("k")).metadata == {"b": "2"}


@pytest.mark.parametrize(
    "call",
    [
        lambda store, path: store.head("missing"),
        lambda store, path: store.get("missing", max_bytes=1),
        lambda store, path: store.get("missing", max_bytes=9, byte_range=(0, 9)),
        lambda store, path: store.get_file("missing", path, max_bytes=1),
    ],
    ids=["head", "get", "range", "get_file"],
)
async def test_a_missing_object(
    store: ObjectStore, tmp_path: Path, call: Callable[[ObjectStore, Path], Awaitable[object]]
) -> None:
    await store.put("present", b"x")
    with pytest.raises(ObjectNotFound) as caught:
        await call(store, tmp_path / "file")
    assert (caught.value.bucket, caught.value.key) == (store.name, "missing")
    assert not (tmp_path / "file").exists()


async def test_create_only_never_overwrites(store: ObjectStore) -> None:
    # On a busy machine an answer can get lost; the client's second attempt then finds the object of the first.
    with contextlib.suppress(PreconditionFailed):
        await store.put("k", b"first", create_only=True)
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"second", create_only=True)
    assert await store.get("k", max_bytes=10) == b"first"


@RACING
async def test_a_create_only_race_has_one_winner(store: ObjectStore) -> None:
    bodies = [bytes([n]) * 1000 for n in range(5)]
    results = await asyncio.gather(*(store.put("k", body, create_only=True) for body in bodies), return_exceptions=True)
    losers = [result for result in results if isinstance(result, BaseException)]
    assert [type(loser) for loser in losers] == [PreconditionFailed] * 4
    winner = next(body for body, result in zip(bodies, results, strict=True) if not isinstance(result, BaseException))
    assert await store.get("k", max_bytes=1000) == winner


@RACING
async def test_a_reader_never_sees_half_an_object(store: ObjectStore) -> None:
    bodies = [bytes([n]) * 200_000 for n in range(3)]
    await store.put("k", bodies[0])

    async def write() -> None:
        for body in bodies * 2:
            await store.put("k", body)

    async with asyncio.TaskGroup() as group:
        writers = [group.create_task(write()) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            assert await store.get("k", max_bytes=200_000) in bodies


async def test_get_refuses_what_is_larger_than_allowed(store: ObjectStore, tmp_path: Path) -> None:
    await store.put("k", BODY)
    with pytest.raises(ObjectTooLarge, match=str(len(BODY))):
        await store.get("k", max_bytes=len(BODY) - 1)
    with pytest.raises(ObjectTooLarge):
        await store.get_file("k", tmp_path / "file", max_bytes=len(BODY) - 1)
    assert not (tmp_path / "file").exists()
    assert await store.get("k", max_bytes=len(BODY)) == BODY


async def test_if_match_pins_the_version(store: ObjectStore, tmp_path: Path) -> None:
    old = await store.put("k", b"old")
    assert await store.get("k", max_bytes=3, if_match=old.etag) == b"old"
    await store.put("k", b"new")
    with pytest.raises(PreconditionFailed):
        await store.get("k", max_bytes=3, if_match=old.etag)
    with pytest.raises(PreconditionFailed):
        await store.get("k", max_bytes=3, if_match=old.etag, byte_range=(0, 2))
    with pytest.raises(PreconditionFailed):
        await store.get_file("k", tmp_path / "file", max_bytes=3, if_match=old.etag)


@pytest.mark.parametrize("byte_range", [(0, 1), (0, len(BODY)), (7, 300), (len(BODY) - 1, len(BODY))])
async def test_a_range_gives_exactly_its_bytes(store: ObjectStore, byte_range: tuple[int, int]) -> None:
    info = await store.put("k", BODY)
    start, stop = byte_range
    got = await store.get("k", max_bytes=stop - start, byte_range=byte_range, if_match=info.etag)
    assert got == BODY[start:stop]


@pytest.mark.parametrize("byte_range", [(0, len(BODY) + 1), (len(BODY) - 1, len(BODY) + 1), (len(BODY), len(BODY) + 1)])
async def test_a_range_beyond_the_end_is_another_object(store: ObjectStore, byte_range: tuple[int, int]) -> None:
    await store.put("k", BODY)
    with pytest.raises(PreconditionFailed):
        await store.get("k", max_bytes=2**20, byte_range=byte_range)


@pytest.mark.parametrize("start", [0, 7, len(BODY) - 1, -1, -9, -len(BODY), -len(BODY) - 9])
async def test_a_piece_is_what_there_is_of_it_and_comes_with_what_the_object_is(store: ObjectStore, start: int) -> None:
    info = await store.put("k", BODY, metadata={"a": "b"})
    for max_bytes in (len(BODY) + 9, max(9, -start)):
        found, data = await store.get_piece("k", start, max_bytes, if_match=info.etag)
        assert data == BODY[start:][:max_bytes]
        assert (found.key, found.size, found.etag, found.metadata) == ("k", len(BODY), info.etag, {"a": "b"})


async def test_pieces_that_are_not_there(store: ObjectStore) -> None:
    await store.put("k", BODY)
    await store.put("empty", b"")
    for key, start in (("k", len(BODY)), ("k", len(BODY) + 9), ("empty", 0), ("empty", -9)):
        with pytest.raises(PreconditionFailed):
            await store.get_piece(key, start, 9)
    with pytest.raises(PreconditionFailed):
        await store.get_piece("k", 0, 9, if_match="0" * 32)
    with pytest.raises(ObjectTooLarge):
        await store.get_piece("k", -9, 8)
    with pytest.raises(ObjectNotFound):
        await store.get_piece("none", 0, 9)


async def test_ranges_that_make_no_sense(store: ObjectStore) -> None:
    await store.put("k", BODY)
    for byte_range in [(0, 0), (5, 4), (-3, 2)]:
        with pytest.raises(StoreError, match="range"):
            await store.get("k", max_bytes=9, byte_range=byte_range)
    with pytest.raises(ObjectTooLarge):
        await store.get("k", max_bytes=9, byte_range=(0, 10))


async def test_list_is_sorted_filtered_and_limited(store: ObjectStore) -> None:
    keys = ["b/2", "a", "b/10", "b", "c", "b/1", "bé", "b%41"]
    for key in keys:
        await store.put(key, key.encode(), metadata={"kept": "out"})

    async def listed(prefix: str = "", start_after: str = "", limit: int | None = None) -> list[str]:
        return [info.key for info in await store.list(prefix, start_after=start_after, limit=limit)]

    assert await listed() == sorted(keys)
    assert await listed("b/") == ["b/1", "b/10", "b/2"]
    assert await listed("b/", start_after="b/1") == ["b/10", "b/2"]
    assert await listed("b/", start_after="b/10", limit=1) == ["b/2"]
    assert await listed(limit=3) == sorted(keys)[:3]
    assert await listed(limit=0) == []
    assert await listed("nothing") == []
    (info,) = await store.list("a")
    head = await store.head("a")
    assert info.metadata == {}
    assert (info.size, info.etag, info.last_modified) == (1, head.etag, head.last_modified)


async def test_an_empty_bucket_lists_nothing(store: ObjectStore) -> None:
    assert await store.list() == []


async def test_delete_twice(store: ObjectStore) -> None:
    await store.put("k", b"x")
    await store.put("other", b"y")
    await store.delete("k")
    await store.delete("k")
    with pytest.raises(ObjectNotFound):
        await store.head("k")
    assert [info.key for info in await store.list()] == ["other"]


async def test_files_travel_whole(store: ObjectStore, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    body = bytes(range(251)) * 10_000
    source.write_bytes(body)
    target.write_bytes(b"older")
    put = await store.put_file("k", source, metadata={"n": "1"})
    got = await store.get_file("k", target, max_bytes=len(body), if_match=put.etag)
    assert target.read_bytes() == body
    assert (got.size, got.etag, got.metadata) == (len(body), md5(body), {"n": "1"})
    assert got == await store.head("k")
    assert (put.size, put.etag, put.metadata) == (got.size, got.etag, got.metadata)
    with pytest.raises(PreconditionFailed):
        await store.put_file("k", source, create_only=True)
    names = await asyncio.to_thread(os.listdir, tmp_path)
    assert set(names) - {"store"} == {"source", "target"}


async def test_a_stream_is_stored_whole_or_not_at_all(store: ObjectStore) -> None:
    async def chunks(*, broken: bool) -> AsyncIterator[bytes]:
        for number in range(200):
            yield bytes([number]) * number
        if broken:
            raise LookupError

    with pytest.raises(LookupError):
        await upload_stream(store, "k", chunks(broken=True))
    with pytest.raises(ObjectNotFound):
        await store.head("k")
    await upload_stream(store, "k", chunks(broken=False))
    body = b"".join(bytes([number]) * number for number in range(200))
    assert await store.get("k", max_bytes=len(body)) == body


async def test_a_failed_download_leaves_the_old_file(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"older")
    await store.put("k", b"newer")
    with pytest.raises(PreconditionFailed):
        await store.get_file("k", target, max_bytes=9, if_match="0" * 32)
    assert target.read_bytes() == b"older"


async def test_put_file_without_a_file(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no local file") as caught:
        await store.put_file("k", tmp_path / "missing")
    assert type(caught.value) is StoreError


@pytest.mark.parametrize(
    "key",
    ["plain", "deep/er/name.json", "sp ace", "pl+us&=?#", "100%", "%2F", "ünïcode-é", "a" * 200, "..a", "x~'()*!"],
)
async def test_unusual_keys_keep_their_names(store: ObjectStore, key: str) -> None:
    await store.put(key, key.encode())
    assert await store.get(key, max_bytes=1024) == key.encode()
    assert [info.key for info in await store.list()] == [key]
    await store.delete(key)
    assert await store.list() == []


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\n", "a\x00b", "a" * 1025, "\ud800"],
)
async def test_keys_that_lead_elsewhere_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(StoreError, match="object key"):
        await store.put(key, b"x")
    with pytest.raises(StoreError, match="object key"):
        await store.get(key, max_bytes=1)
    with pytest.raises(StoreError, match="object key"):
        await store.delete(key)
    assert await store.list() == []


@pytest.mark.parametrize(
    "metadata", [{"Upper": "x"}, {"": "x"}, {"a": "é"}, {"a": " x"}, {"a": "x\r\nb: y"}, {"a": "x" * 2048}]
)
async def test_metadata_that_no_header_carries_is_refused(store: ObjectStore, metadata: dict[str, str]) -> None:
    with pytest.raises(StoreError, match="metadata"):
        await store.put("k", b"x", metadata=metadata)


async def test_records_can_not_be_changed_from_outside(store: ObjectStore) -> None:
    given = {"a": "1"}
    put = await store.put("k", b"x", metadata=given)
    given["a"] = "2"
    put.metadata["a"] = "3"
    (await store.head("k")).metadata["a"] = "4"
    assert (await store.head("k")).metadata == {"a": "1"}


async def test_a_folder_takes_files_of_any_size(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket accepts larger ones in parts."""
    monkeypatch.setattr("tplr.storage.s3_store.MAX_PUT_BYTES", len(BODY) - 1)
    (tmp_path / "file").write_bytes(BODY)
    if store.multipart is None:
        await store.put_file("k", tmp_path / "file")
        assert await store.get("k", max_bytes=len(BODY)) == BODY
    else:
        with pytest.raises(ObjectTooLarge, match="one PUT carries at most"):
            await store.put_file("k", tmp_path / "file")
