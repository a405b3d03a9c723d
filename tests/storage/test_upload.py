"""Uploads in parts against R2's rules and a bad network: complete or absent, no part sent twice or left over."""

import asyncio
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tplr.errors import AccessDenied, ObjectNotFound, StoreError, StoreUnavailable
from tplr.storage import (
    DirectoryStore,
    MemoryStore,
    ObjectStore,
    abort_uploads,
    etag_of,
    upload,
    upload_file,
    upload_stream,
)
from tplr.storage.parts import PART_RULE, FilePart, cut, md5_hex, multipart_etag
from tplr.storage.s3_body import FileBody
from tplr.testing.s3server import Delay, FlipSentBit, LoseResponse, Reset, Status, op_multipart

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = 2**16
BODY = os.urandom(4 * PART + 123)
ETAG = multipart_etag([md5_hex(BODY[at : at + PART]) for at in range(0, len(BODY), PART)])
SHA256S = [hashlib.sha256(BODY[at : at + PART]).hexdigest() for at in range(0, len(BODY), PART)]
SENT = r"^PUT /bucket/k2?\?.*partNumber="


@pytest.fixture
def source(r2) -> Path:
    path = r2.root / "source"
    path.write_bytes(BODY)
    return path


async def check_stored(store: ObjectStore) -> None:
    assert await store.get("k", max_bytes=len(BODY)) == BODY
    assert await store.multipart.unfinished() == []


async def test_a_file_goes_up_in_equal_parts(r2, source: Path) -> None:
    told: list[tuple[int, int]] = []
    info = await upload_file(r2.store, "k", source, progress=lambda done, total: told.append((done, total)))
    assert (info.key, info.size, info.etag, info.metadata) == ("k", len(BODY), ETAG, PART_RULE)
    assert len(r2.seen(SENT)) == 5
    assert [total for _, total in told] == [len(BODY)] * 5
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (len(BODY), len(BODY))
    await check_stored(r2.store)


async def test_a_stream_goes_up_in_equal_parts(r2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(BODY), 1000):
            yield BODY[start : start + 1000]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    r2.server.faults.add("partNumber=3", Status(500))
    assert (await upload_stream(r2.store, "k", chunks())).etag == ETAG
    await check_stored(r2.store)
    assert not list(tmp_path.glob("tplr-upload-*"))


@pytest.mark.parametrize("size", [0, 1, 2 * PART])
async def test_what_is_two_parts_at_most_is_one_put(r2, source: Path, size: int) -> None:
    source.write_bytes(BODY[:size])
    info = await upload_file(r2.store, "k", source)
    assert (info.size, info.etag) == (size, md5_hex(BODY[:size]))
    assert r2.requests == ["PUT /bucket/k"]


async def test_what_is_more_goes_up_in_parts(r2, source: Path) -> None:
    source.write_bytes(BODY[: 2 * PART + 1])
    assert (await upload_file(r2.store, "k", source)).etag.endswith("-3")


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: DirectoryStore(path / "store")])
async def test_stores_without_parts_take_the_file_whole(r2, source: Path, make: Any) -> None:
    store = make(r2.root)
    info = await upload_file(store, "k", source)
    assert info.etag == md5_hex(BODY)
    assert await abort_uploads(store) == 0


@pytest.mark.parametrize(
    "verb", ["^GET .*uploads", "^POST .*uploads", "^GET .*uploadId", SENT, "^POST .*uploadId", "^HEAD"]
)
@pytest.mark.parametrize(
    "fault",
    [Reset(), LoseResponse(), Status(500), Status(503, "SlowDown")],
    ids=["reset", "lost", "500", "slowdown"],
)
async def test_every_request_may_fail(r2, source: Path, verb: str, fault: Any) -> None:
    if verb == "^GET .*uploadId":  # only requested for an upload that was begun before
        await r2.store.multipart.create("k", metadata=PART_RULE)
    # A request that broke on a reused connection is repeated at once.
    fault_of_verb = r2.server.faults.add(verb, fault, times=2 if isinstance(fault, (Reset, LoseResponse)) else 1)
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    assert fault_of_verb.left == 0 or isinstance(fault, LoseResponse)
    await check_stored(r2.store)


@pytest.mark.parametrize("verb", [SENT, "^POST .*uploadId"])
async def test_throttling_is_waited_out(r2, source: Path, verb: str) -> None:
    r2.server.faults.add(verb, Status(429, "TooManyRequests"))
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    await check_stored(r2.store)


async def test_a_complete_that_fails_behind_a_200(r2, source: Path) -> None:
    r2.server.faults.add("^POST .*uploadId", Status(200, "InternalError"))
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    await check_stored(r2.store)


async def test_only_the_part_that_failed_is_sent_again(r2, source: Path) -> None:
    r2.server.faults.add(r"partNumber=3", Status(500), times=2)
    await upload_file(r2.store, "k", source)
    assert len(r2.seen(SENT)) == 7
    assert len(r2.seen("partNumber=3")) == 3


async def test_a_part_that_hangs_is_given_up_and_sent_again(r2, source: Path) -> None:
    r2.server.faults.add("partNumber=2", Delay(30))
    await upload_file(r2.hasty, "k", source)
    assert len(r2.seen("partNumber=2")) == 2
    await check_stored(r2.store)


async def test_never_more_parts_at_once_than_allowed(r2, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = 0, 0
    put_part = type(r2.store.multipart).put_part

    async def counted(self, *args: Any) -> str:
        nonlocal held, most
        held += 1
        most = max(most, held)
        md5 = await put_part(self, *args)
        held -= 1
        return md5

    monkeypatch.setattr(type(r2.store.multipart), "put_part", counted)
    await upload_file(r2.store, "k", source, concurrency=2)
    assert most == 2


async def test_what_arrived_before_a_dead_network_is_not_sent_again(r2, source: Path) -> None:
    fault = r2.server.faults.add("partNumber=4", Reset(), times=None)
    with pytest.raises(StoreUnavailable):
        await upload_file(r2.store, "k", source, deadline_seconds=2, concurrency=1)
    fault.left = 0
    r2.requests.clear()
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    assert {request.partition("partNumber=")[2][0] for request in r2.seen(SENT)} == {"4", "5"}
    await check_stored(r2.store)


async def test_parts_of_another_file_are_not_taken_for_ours(r2, source: Path) -> None:
    r2.server.faults.add("partNumber=5", Reset(), times=None)
    source.write_bytes(bytes(len(BODY)))
    with pytest.raises(StoreUnavailable):
        await upload_file(r2.store, "k", source, deadline_seconds=2, concurrency=1)
    r2.server.faults.clear()
    source.write_bytes(BODY)
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    await check_stored(r2.store)


async def test_an_upload_killed_half_way_goes_on_in_the_next_process(r2, source: Path) -> None:
    r2.server.faults.add("partNumber=4", Delay(60), times=None)
    bucket = r2.store.client.bucket
    code = f"""
import asyncio, pathlib
from tplr.schemas import Bucket
from tplr.storage import S3Connections, parts, upload_file
parts.MIB = parts.MIN_PART_BYTES = {PART}
async def main():
    bucket = Bucket(name="bucket", account_id="a" * 32, access_key_id={bucket.access_key_id!r},
                    secret_access_key={bucket.secret_access_key!r})
    async with S3Connections({r2.server.endpoint!r}) as connections:
        await upload_file(connections.store(bucket), "k", pathlib.Path({str(source)!r}), concurrency=1)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    while not r2.seen("partNumber=4"):
        assert process.returncode is None
        await asyncio.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    with pytest.raises(ObjectNotFound):
        await r2.store.head("k")
    r2.server.faults.clear()
    r2.requests.clear()
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    assert len(r2.seen(SENT)) == 2
    await check_stored(r2.store)


async def test_stale_uploads_are_aborted_but_young_ones_are_not(r2) -> None:
    for key in ("checkpoint/a", "checkpoint/b", "checkpoint/b", "other"):
        await r2.store.multipart.create(key)
    assert await abort_uploads(r2.store, older_than_seconds=60) == 0
    assert await abort_uploads(r2.store, "checkpoint/") == 3
    assert [upload.key for upload in await r2.store.multipart.unfinished()] == ["other"]
    assert await abort_uploads(r2.store) == 1


async def test_an_upload_that_still_gets_parts_is_not_stale(r2, r2_place, source: Path, monkeypatch) -> None:
    monkeypatch.setattr(r2_place, "ahead", -100.0)
    upload_id = await r2.store.multipart.create("slow")
    await r2.store.multipart.create("abandoned")
    monkeypatch.setattr(r2_place, "ahead", 0.0)
    await r2.store.multipart.put_part("slow", upload_id, cut(source.stat().st_size)[0], source)
    assert await abort_uploads(r2.store, older_than_seconds=60) == 1
    assert [upload.key for upload in await r2.store.multipart.unfinished()] == ["slow"]


async def test_an_earlier_upload_of_the_same_key_leaves_nothing(r2, source: Path) -> None:
    for _ in range(3):
        await r2.store.multipart.create("k")
    await r2.store.multipart.create("k-and-more")
    await upload_file(r2.store, "k", source)
    assert [upload.key for upload in await r2.store.multipart.unfinished()] == ["k-and-more"]


async def test_revoked_credentials_end_it_at_once(r2, source: Path) -> None:
    bucket = r2.store.client.bucket
    revoked = {bucket.access_key_id: {"secret": bucket.secret_access_key, "buckets": {"bucket": "read"}}}

    def revoke(done: int, total: int) -> None:
        r2.server.keys.replace(revoked)

    with pytest.raises(AccessDenied) as caught:
        await upload_file(r2.store, "k", source, concurrency=1, progress=revoke)
    # Aborting is not allowed either, which is also reported.
    assert "its parts stay in the store" in caught.value.__notes__[0]
    assert len(r2.seen(SENT)) == 2


async def test_a_missing_bucket(r2, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r2.server.objects._buckets.clear()
    monkeypatch.setattr(r2.server.keys, "buckets", frozenset)
    with pytest.raises(ObjectNotFound, match="no such bucket"):
        await upload_file(r2.store, "k", source)


async def test_an_upload_that_is_aborted_meanwhile(r2, source: Path) -> None:
    async def abort() -> None:
        (under_way,) = await r2.store.multipart.unfinished()
        await r2.store.multipart.abort("k", under_way.upload_id)

    tasks: list[asyncio.Task[None]] = []
    r2.server.faults.add("partNumber=3", Delay(0.2))
    with pytest.raises(ObjectNotFound, match="no such upload"):
        await upload_file(
            r2.store, "k", source, progress=lambda *_: tasks.append(asyncio.create_task(abort())) if not tasks else None
        )
    await tasks[0]


@pytest.mark.parametrize("request_", ["^GET .*uploadId", "^DELETE .*uploadId"])
async def test_uploads_that_expire_before_they_are_resumed_do_not_end_it(r2, source: Path, request_: str) -> None:
    """A store lists an upload that it has aborted since then, by its lifecycle rule."""
    for _ in range(2):
        await r2.store.multipart.create("k")
    r2.server.faults.add(request_, Status(404, "NoSuchUpload"))
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    assert await r2.store.get("k", max_bytes=len(BODY)) == BODY


async def test_a_file_that_changes_meanwhile_is_not_published(r2, source: Path) -> None:
    def change(done: int, total: int) -> None:
        os.utime(source, (1, done))

    with pytest.raises(StoreError, match="changed during the upload"):
        await upload_file(r2.store, "k", source, progress=change)
    with pytest.raises(ObjectNotFound):
        await r2.store.head("k")
    assert await r2.store.multipart.unfinished() == []


async def test_a_missing_file(r2) -> None:
    with pytest.raises(StoreError, match="no local file"):
        await upload_file(r2.store, "k", r2.root / "missing")
    assert r2.requests == []


async def test_a_bit_that_flips_on_the_way_up_is_found_and_sent_again(r2, source: Path) -> None:
    rule = r2.server.faults.add(SENT, FlipSentBit(at=1000))
    assert (await upload_file(r2.store, "k", source)).etag == ETAG
    assert rule.left == 0
    assert len(r2.seen(SENT)) == 6
    await check_stored(r2.store)


async def test_bits_that_flip_for_ever_end_with_the_deadline(r2, source: Path) -> None:
    r2.server.faults.add(SENT, FlipSentBit(at=1000), times=None)
    with pytest.raises(StoreUnavailable, match=r"part \d arrived damaged"):
        await upload_file(r2.store, "k", source, deadline_seconds=0.3)
    with pytest.raises(ObjectNotFound):
        await r2.store.head("k")


async def test_with_known_digests_the_store_checks_and_nothing_is_hashed_here(
    r2, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileBody, "md5", None)
    monkeypatch.setattr(upload, "hash_file", None)
    info = await upload_file(r2.store, "k", source, sha256s=SHA256S)
    assert info.etag == ETAG
    await check_stored(r2.store)


async def test_a_store_refuses_a_flipped_bit_by_the_digest_that_was_signed(r2, source: Path) -> None:
    rule = r2.server.faults.add(SENT, FlipSentBit(at=1000))
    assert (await upload_file(r2.store, "k", source, sha256s=SHA256S)).etag == ETAG
    assert rule.left == 0
    assert len(r2.seen(SENT)) == 6
    await check_stored(r2.store)
    r2.server.faults.add(SENT, FlipSentBit(at=1000), times=None)
    with pytest.raises(StoreUnavailable, match="the body arrived damaged"):
        await upload_file(r2.store, "k2", source, sha256s=SHA256S, deadline_seconds=1.0, concurrency=1)


async def test_a_file_that_is_not_what_its_digests_say_is_not_stored(r2, source: Path) -> None:
    with pytest.raises(StoreError, match="part 3 does not match its digest") as refused:
        await upload_file(r2.store, "k", source, sha256s=[*SHA256S[:2], "0" * 64, *SHA256S[3:]])
    assert not isinstance(refused.value, StoreUnavailable)
    assert len(r2.seen("partNumber=3")) == 1
    assert await r2.store.list() == await r2.store.multipart.unfinished() == []


@pytest.mark.parametrize("size", [0, 1, 2 * PART, 2 * PART + 1, len(BODY)])
async def test_what_etag_a_file_will_have(r2, source: Path, size: int) -> None:
    source.write_bytes(BODY[:size])
    for store in (r2.store, MemoryStore()):
        assert (await upload_file(store, "k", source)).etag == etag_of(store, source)


async def test_the_deadline_comes_from_the_size(r2, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(upload, "FLOOR", len(BODY) / 0.2)
    r2.server.faults.add(SENT, Status(503, "SlowDown"), times=None)
    with pytest.raises(StoreUnavailable, match="throttled"):
        await upload_file(r2.store, "k", source)
    r2.server.faults.clear()
    assert await abort_uploads(r2.store) == 1


async def test_long_lists_come_page_by_page(r2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_multipart, "MAX_PAGE", 2)
    multipart = r2.store.multipart
    ids = [await multipart.create(f"k{number % 2}") for number in range(5)]
    (r2.root / "x").write_bytes(b"x")
    for number in range(1, 6):
        await multipart.put_part("k0", ids[0], FilePart(number, 0, 1), r2.root / "x")
    assert await multipart.parts("k0", ids[0]) == dict.fromkeys(range(1, 6), md5_hex(b"x"))
    assert [upload.upload_id for upload in await multipart.unfinished()] == [*ids[0::2], *ids[1::2]]
