"""Downloads in parts over a bad network: complete and verified or absent; no part fetched twice or left over."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from blake3 import blake3

from tplr.errors import AccessDenied, ObjectNotFound, PreconditionFailed, StoreError, StoreUnavailable
from tplr.storage import (
    DirectoryStore,
    MemoryStore,
    ObjectStore,
    discard_download,
    download,
    download_file,
    partial,
    s3_http,
    upload_file,
)
from tplr.testing.s3server import Delay, Drip, FlipBit, Reset, Status, Truncate

pytestmark = pytest.mark.asyncio(loop_scope="module")
OVERWRITES = True  # without a pause
PART = 2**16
BODY = os.urandom(4 * PART + 123)
BLAKE3S = [blake3(BODY[at : at + PART]).hexdigest() for at in range(0, len(BODY), PART)]
GET = "^GET /bucket/k$"


@pytest_asyncio.fixture(loop_scope="module")
async def stored(r2) -> ObjectStore:
    await r2.store.put("k", BODY)
    r2.requests.clear()
    return r2.store


@pytest.fixture
def target(r2) -> Path:
    return r2.root / "folder" / "target"


def check_whole(target: Path) -> None:
    assert target.read_bytes() == BODY
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def check_nothing(target: Path) -> None:
    assert not target.parent.exists() or list(target.parent.iterdir()) == []


async def fetch(store: ObjectStore, target: Path, **more: Any) -> None:
    await download_file(store, "k", target, **{"size": len(BODY), "blake3s": BLAKE3S} | more)


async def test_an_object_comes_down_in_parts(r2, stored: ObjectStore, target: Path) -> None:
    told: list[tuple[int, int]] = []
    await fetch(stored, target, progress=lambda done, total: told.append((done, total)))
    check_whole(target)
    assert len(r2.requests) == len(r2.seen(GET)) == 5
    assert told[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


async def test_what_went_up_in_parts_comes_down(r2, target: Path) -> None:
    source = r2.root / "source"
    source.write_bytes(BODY)
    await upload_file(r2.store, "k", source)
    await fetch(r2.store, target)
    check_whole(target)


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: DirectoryStore(path / "store")])
async def test_every_store_has_parts_to_give(r2, target: Path, make: Any) -> None:
    store = make(r2.root)
    await store.put("k", BODY)
    await fetch(store, target)
    check_whole(target)


async def test_an_empty_object(r2, target: Path) -> None:
    await r2.store.put("k", b"")
    await fetch(r2.store, target, size=0, blake3s=[])
    assert target.read_bytes() == b""


@pytest.mark.parametrize(
    "fault",
    [
        Reset(),
        Truncate(after=PART // 2),
        Truncate(after=PART // 2, reset=True),
        Status(500),
        Status(503, "SlowDown"),
        Status(429, "TooManyRequests"),
        Drip(1000),
        Drip(0),
        Delay(30),
    ],
    ids=["reset", "short", "reset-mid-body", "500", "slowdown", "429", "drip", "stall", "hang"],
)
async def test_every_request_may_fail(r2, stored: ObjectStore, target: Path, fault: Any) -> None:
    rule = r2.server.faults.add(GET, fault, times=2 if isinstance(fault, Reset) else 1)
    await fetch(r2.hasty if isinstance(fault, (Drip, Delay)) else stored, target)
    assert rule.left == 0
    check_whole(target)


async def test_only_the_part_that_failed_is_fetched_again(r2, stored: ObjectStore, target: Path) -> None:
    r2.server.faults.add(GET, Status(500), times=3)
    await fetch(stored, target, concurrency=1)
    assert len(r2.seen(GET)) == 8


async def test_what_arrived_before_a_dead_network_is_not_fetched_again(r2, stored: ObjectStore, target: Path) -> None:
    await half_done(r2, target)
    assert not target.exists()
    await fetch(stored, target)
    assert len(r2.seen(GET)) == 2
    check_whole(target)


@pytest.mark.parametrize("key", ["missing", "refused"])
async def test_what_arrived_is_kept_if_another_source_lacks_the_object(
    r2, stored: ObjectStore, target: Path, key: str
) -> None:
    await half_done(r2, target)
    r2.server.faults.add("^GET .*/refused", Status(403, "AccessDenied"), times=None)
    with pytest.raises((ObjectNotFound, AccessDenied)):
        await download_file(stored, key, target, size=len(BODY), blake3s=BLAKE3S)
    await fetch(stored, target)
    assert len(r2.seen(GET)) == 2
    check_whole(target)


async def test_a_cancelled_download_goes_on_later(r2, stored: ObjectStore, target: Path) -> None:
    half_way = asyncio.Event()
    task = asyncio.create_task(
        fetch(stored, target, concurrency=1, progress=lambda done, _: half_way.set() if done >= 2 * PART else None)
    )
    await half_way.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    r2.requests.clear()
    await fetch(stored, target)
    assert 1 <= len(r2.seen(GET)) <= 3
    check_whole(target)


async def half_done(r2, target: Path) -> None:
    """Three of five parts exist, and the network failed."""

    def cut_off(done: int, total: int) -> None:
        if done >= 3 * PART:
            r2.server.faults.add(GET, Reset(), times=None)

    with pytest.raises(StoreUnavailable):
        await fetch(r2.store, target, concurrency=1, deadline_seconds=2, progress=cut_off)
    r2.server.faults.clear()
    r2.requests.clear()


async def test_bytes_that_changed_on_disk_meanwhile_are_fetched_again(r2, stored: ObjectStore, target: Path) -> None:
    await half_done(r2, target)
    with (target.parent / "target.part").open("r+b") as file:
        file.seek(PART + 5)
        file.write(b"?")
    await fetch(stored, target)
    assert len(r2.seen(GET)) == 2 + 1  # the missing parts, and the changed part
    check_whole(target)


@pytest.mark.parametrize("size", [0, len(BODY) - 1, len(BODY), len(BODY) + 1])
async def test_what_lies_there_of_something_else_is_worth_nothing(
    r2, stored: ObjectStore, target: Path, size: int
) -> None:
    target.parent.mkdir()
    (target.parent / "target.part").write_bytes(os.urandom(size))
    await fetch(stored, target)
    assert len(r2.seen(GET)) == 5
    check_whole(target)


async def test_parts_of_an_older_version_are_not_mixed_in(r2, stored: ObjectStore, target: Path) -> None:
    await half_done(r2, target)
    newer = BODY[:PART] + os.urandom(len(BODY) - PART)
    await stored.put("k", newer)
    blake3s = [blake3(newer[at : at + PART]).hexdigest() for at in range(0, len(newer), PART)]
    await fetch(stored, target, blake3s=blake3s)
    assert target.read_bytes() == newer
    assert len(r2.seen(GET)) == 4  # the first part is the same in both


async def test_who_will_not_call_again_leaves_nothing(r2, stored: ObjectStore, target: Path) -> None:
    await half_done(r2, target)
    discard_download(target)
    discard_download(target)
    check_nothing(target)


async def test_an_object_swapped_between_its_parts(r2, stored: ObjectStore, target: Path) -> None:
    folder = r2.root / "elsewhere"
    replaced = DirectoryStore(folder)
    await replaced.put("k", BODY)

    def swap(done: int, total: int) -> None:
        path = next(folder.iterdir())
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"etag": "', b'"etag": "f', 1)[: len(data)])

    with pytest.raises(PreconditionFailed):
        await fetch(replaced, target, concurrency=1, progress=swap)
    check_nothing(target)


async def test_an_object_swapped_under_a_request(r2, stored: ObjectStore, target: Path) -> None:
    """Even by one that differs only in its ETag."""
    same = r2.root / "same"
    same.write_bytes(BODY)
    r2.server.faults.add(GET, Delay(1.5))  # longer than the other parts and the upload take
    others_done = asyncio.Event()
    task = asyncio.create_task(
        fetch(
            stored,
            target,
            concurrency=2,
            progress=lambda done, total: others_done.set() if done >= total - PART else None,
        )
    )
    await others_done.wait()
    await upload_file(stored, "k", same)
    with pytest.raises(PreconditionFailed, match="ETag"):
        await task
    check_nothing(target)


@pytest.mark.parametrize("size", [len(BODY) - 1, len(BODY) + 1])
async def test_an_object_of_another_size(r2, stored: ObjectStore, target: Path, size: int) -> None:
    with pytest.raises(PreconditionFailed, match=f"has {len(BODY)} bytes"):
        await fetch(stored, target, size=size)
    check_nothing(target)


async def test_another_version_than_wanted(r2, stored: ObjectStore, target: Path) -> None:
    with pytest.raises(PreconditionFailed):
        await fetch(stored, target, if_match="another")
    check_nothing(target)


async def test_one_flipped_bit_is_found_and_its_part_fetched_again(r2, stored: ObjectStore, target: Path) -> None:
    r2.server.faults.add(GET, FlipBit(at=1000))
    await fetch(stored, target)
    assert len(r2.seen(GET)) == 5 + 1
    check_whole(target)


async def test_a_part_that_is_never_right_is_named(r2, stored: ObjectStore, target: Path) -> None:
    wrong = [*BLAKE3S[:2], "0" * 64, *BLAKE3S[3:]]
    with pytest.raises(PreconditionFailed, match=r"not the object's bytes: BLAKE3 of part 3 is .*, expected 0000"):
        await fetch(stored, target, blake3s=wrong, concurrency=1)
    assert len(r2.seen(GET)) == 2 + 2
    check_nothing(target)


async def test_an_older_file_stays_until_the_new_one_is_whole(r2, stored: ObjectStore, target: Path) -> None:
    target.parent.mkdir()
    target.write_text("older")
    with pytest.raises(PreconditionFailed):
        await fetch(stored, target, blake3s=["0" * 64] * 5)
    assert target.read_text() == "older"
    await fetch(stored, target)
    check_whole(target)


async def test_revoked_credentials_end_it(r2, stored: ObjectStore, target: Path) -> None:
    with pytest.raises(AccessDenied):
        await fetch(stored, target, concurrency=1, progress=lambda *_: r2.server.keys.replace({}))
    assert len(r2.seen(GET)) == 2
    check_nothing(target)


async def test_a_missing_object(r2, target: Path) -> None:
    with pytest.raises(ObjectNotFound):
        await fetch(r2.store, target)
    check_nothing(target)


async def test_the_deadline_comes_from_the_size(
    r2, stored: ObjectStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(download, "FLOOR", len(BODY) / 0.3)
    r2.server.faults.add(GET, Status(503, "SlowDown"), times=None)
    with pytest.raises(StoreUnavailable, match="throttled"):
        await fetch(stored, target)


async def test_a_folder_that_is_a_file(r2, stored: ObjectStore) -> None:
    (r2.root / "file").write_text("x")
    with pytest.raises(StoreError):
        await fetch(stored, r2.root / "file" / "target")


async def test_parts_under_way_are_bounded(
    r2, stored: ObjectStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most = 0, 0
    receive = type(stored).receive

    async def counted(self, *args: Any, **more: Any) -> Any:
        nonlocal held, most
        held += more["max_bytes"]
        most = max(most, held)
        info = await receive(self, *args, **more)
        held -= more["max_bytes"]
        return info

    monkeypatch.setattr(type(stored), "receive", counted)
    await fetch(stored, target, concurrency=2)
    assert most == 2 * PART


async def test_a_part_that_broke_off_goes_on_where_it_was(
    r2, stored: ObjectStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_http, "PIECE_BYTES", PART // 8)
    r2.server.faults.add(GET, Truncate(after=PART // 2))
    asked: list[tuple[int, int]] = []
    receive = type(stored).receive
    monkeypatch.setattr(
        type(stored),
        "receive",
        lambda self, *args, **more: (asked.append(more["byte_range"]), receive(self, *args, **more))[1],
    )
    await fetch(stored, target, concurrency=1)
    assert asked[0] == (0, PART)
    assert 0 < asked[1][0] <= PART // 2
    assert asked[1][1] == PART
    assert len(asked) == 6
    check_whole(target)


async def test_bytes_damaged_before_a_part_broke_off_are_found(r2, stored: ObjectStore, target: Path) -> None:
    """They are not fetched again with the rest of their part, so the digest must cover the bytes that are on disk."""
    r2.server.faults.add(GET, FlipBit(at=1000))
    r2.server.faults.add(GET, Truncate(after=PART // 2))
    await fetch(stored, target, concurrency=1)
    check_whole(target)


async def test_a_full_disk_ends_it_at_once_and_keeps_what_is_there(
    r2, stored: ObjectStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a network error, so the part is not requested again."""

    def no_space(descriptor: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(partial.os, "pwrite", no_space)
    with pytest.raises(StoreUnavailable, match="disk full: free some space"):
        await fetch(stored, target, concurrency=1)
    assert len(r2.seen(GET)) == 1
    assert (target.parent / "target.part").exists()
