"""Each peer is judged alone, by the store's time stamps; one peer's invalid bytes do not affect other peers."""

import asyncio
import dataclasses
import hashlib
from typing import Any

import pytest

from tplr.errors import AccessDenied, EmptyUpdate, PayloadError, StoreUnavailable
from tplr.exchange import gather as gather_module
from tplr.exchange.gather import GatherRules, gather
from tplr.keys import commit_key, gradient_key
from tplr.schemas import ObjectInfo, Reason, UploadBounds
from tplr.storage import MemoryStore

WINDOW, VERSION, SIZE = 7, "1", 64
T0 = 1_700_000_000.0
BOUNDS = UploadBounds(start=T0 + 0.4, end=T0 + 10.4)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "POLL_SECONDS", 0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules(GatherRules[bytes]):
    """An object holds its owner's uid, ``SIZE`` times."""

    require_commit: bool = True

    def key(self, uid: int) -> str:
        return gradient_key(self.window, uid, VERSION)

    def commit_key(self, uid: int) -> str | None:
        return commit_key(self.window, uid, VERSION) if self.require_commit else None

    def parse(self, body: bytes, uid: int) -> bytes:
        if not any(body):
            raise EmptyUpdate("zeros")
        if body[0] != uid:
            raise PayloadError(f"made by uid {body[0]}, not {uid}")
        return body


RULES = Rules(window=WINDOW, bounds=BOUNDS, closes_in=-1.0, patience=0.1, size=SIZE)


def body_of(uid: int) -> bytes:
    return bytes([uid]) * SIZE


class Peer(MemoryStore):
    """A bucket whose owner decides when objects are written."""

    def __init__(self, uid: int) -> None:
        self.now = T0
        self.uid = uid
        super().__init__(f"peer-{uid}", clock=lambda: self.now)

    async def commit(self, at: float = T0 - 3, sha256: str | None = None) -> None:
        self.now = at
        sha256 = sha256 or hashlib.sha256(body_of(self.uid)).hexdigest()
        await self.put(commit_key(WINDOW, self.uid, VERSION), b"", metadata={"sha256": sha256})

    async def upload(self, at: float = T0 + 2, body: bytes | None = None) -> None:
        self.now = at
        await self.put(gradient_key(WINDOW, self.uid, VERSION), body_of(self.uid) if body is None else body)


async def honest(uid: int) -> Peer:
    peer = Peer(uid)
    await peer.commit()
    await peer.upload()
    return peer


async def judge(peer: MemoryStore | None, uid: int = 3, **rules: object) -> Reason | bytes:
    """Return the verdict on ``peer``, gathered between two honest peers that must succeed for any behaviour of
    ``peer``."""
    stores = {1: await honest(1), uid: peer, 5: await honest(5)}
    result = await gather(stores, dataclasses.replace(RULES, **rules))
    gathered = {one.uid: one.update for one in result.updates}
    assert {1, 5} <= set(gathered)
    assert list(gathered) == sorted(gathered)
    return gathered[uid] if uid in gathered else result.skipped[uid]


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_so_many_peers_are_asked_at_once(concurrency: int) -> None:
    now = most = 0

    class Counting(Peer):
        async def head(self, key: str) -> ObjectInfo:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return await super().head(key)

    peers = {uid: Counting(uid) for uid in range(1, 7)}  # the update of uid 0 would be empty
    for peer in peers.values():
        await peer.commit()
        await peer.upload()
    result = await gather(peers, dataclasses.replace(RULES, patience=10.0), concurrency=concurrency)
    assert [one.uid for one in result.updates] == [*range(1, 7)]
    assert most == concurrency


async def test_honest_peer_is_gathered_with_hash_and_size() -> None:
    result = await gather({3: await honest(3)}, RULES)
    (one,) = result.updates
    assert (one.uid, one.update, one.size) == (3, body_of(3), SIZE)
    assert one.sha256 == hashlib.sha256(body_of(3)).hexdigest()
    assert result.skipped == {}
    assert result.bytes == SIZE


@pytest.mark.parametrize(
    ("stamp", "verdict"),
    [
        # The store truncates time stamps to seconds: T0 covers [T0, T0 + 1), which includes the start at T0 + 0.4.
        (T0 - 1, Reason.TOO_EARLY),
        (T0, None),
        (T0 + 10, None),
        (T0 + 11, Reason.TOO_LATE),
    ],
)
async def test_time_bounds(stamp: float, verdict: Reason | None) -> None:
    peer = Peer(3)
    await peer.commit()
    await peer.upload(at=stamp)
    assert await judge(peer) == (verdict or body_of(3))


async def test_reasons_of_refusal() -> None:
    nothing = Peer(3)
    uncommitted = Peer(3)
    await uncommitted.upload()
    committed_late = Peer(3)
    await committed_late.commit(at=T0 + 1)
    await committed_late.upload()
    committed_to_another = Peer(3)
    await committed_to_another.commit(sha256="0" * 64)
    await committed_to_another.upload()
    short = Peer(3)
    await short.commit()
    await short.upload(body=body_of(3)[:-1])
    foreign = Peer(3)
    await foreign.commit(sha256=hashlib.sha256(body_of(9)).hexdigest())
    await foreign.upload(body=body_of(9))
    empty = Peer(3)
    await empty.commit(sha256=hashlib.sha256(body_of(0)).hexdigest())
    await empty.upload(body=body_of(0))

    assert await judge(None) is Reason.NO_BUCKET
    assert await judge(nothing) is Reason.MISSING
    assert await judge(uncommitted) is Reason.NO_COMMIT
    assert await judge(uncommitted, require_commit=False) == body_of(3)
    assert await judge(committed_late) is Reason.NO_COMMIT
    assert await judge(committed_to_another) is Reason.HASH_MISMATCH
    assert await judge(short) is Reason.WRONG_SIZE
    assert await judge(foreign) is Reason.MALFORMED
    assert await judge(empty) is Reason.EMPTY


async def test_waits_for_an_upload_until_the_bound_has_passed() -> None:
    peer = Peer(3)
    await peer.commit()

    async def upload_soon() -> None:
        await asyncio.sleep(0.1)
        await peer.upload()

    async with asyncio.TaskGroup() as group:
        group.create_task(upload_soon())
        verdict = group.create_task(judge(peer, closes_in=0.3))
    assert verdict.result() == body_of(3)


async def test_what_is_replaced_before_the_bound_is_judged_as_it_is_then() -> None:
    """Otherwise a node that polls early and one that polls late would continue with different models."""
    peer = Peer(3)
    await peer.commit()
    await peer.upload(at=T0 - 1)

    async def replace_soon() -> None:
        await asyncio.sleep(0.1)
        await peer.upload()

    async with asyncio.TaskGroup() as group:
        group.create_task(replace_soon())
        verdict = group.create_task(judge(peer, closes_in=0.3))
    assert verdict.result() == body_of(3)


class Broken(Peer):
    """Answers the first ``failures`` requests with an error."""

    def __init__(self, uid: int, error: Exception, failures: int) -> None:
        super().__init__(uid)
        self.error = error
        self.failures = failures

    async def head(self, key: str) -> ObjectInfo:
        if self.failures > 0:
            self.failures -= 1
            raise self.error
        return await super().head(key)


@pytest.mark.parametrize(
    ("error", "failures", "verdict"),
    [
        (StoreUnavailable("503"), 2, None),
        (StoreUnavailable("503"), 10**9, Reason.UNAVAILABLE),
        (AccessDenied("403"), 10**9, Reason.DENIED),
    ],
)
async def test_what_passes_is_waited_for(error: Exception, failures: int, verdict: Reason | None) -> None:
    peer = Broken(3, error, failures)
    await peer.commit()
    await peer.upload()
    assert await judge(peer) == (verdict or body_of(3))


class Swapping(Peer):
    """Replaces the object after each HEAD."""

    async def head(self, key: str) -> ObjectInfo:
        info = await super().head(key)
        if key.startswith("gradient"):
            self.swaps = getattr(self, "swaps", 0) + 1
            await self.upload(body=bytes([3, self.swaps % 256]) * (SIZE // 2))
        return info


async def test_object_swapped_between_head_and_get_is_never_taken() -> None:
    peer = Swapping(3)
    await peer.commit()
    await peer.upload()
    assert await judge(peer) is Reason.MALFORMED


class Stalling(Peer):
    """Accepts every request and never answers."""

    async def head(self, key: str) -> ObjectInfo:
        await asyncio.Event().wait()
        return await super().head(key)


async def test_a_bucket_that_stalls_never_outlives_patience() -> None:
    async with asyncio.timeout(10):
        assert await judge(Stalling(3), patience=0.3) is Reason.UNAVAILABLE


async def test_nobody_waits_for_a_bucket_that_stalls_when_the_bound_has_passed() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await judge(Stalling(3), patience=0.0, closes_in=gather_module.ANSWER_SECONDS) is Reason.UNAVAILABLE
    assert loop.time() - began < gather_module.ANSWER_SECONDS + 1.0


async def test_the_last_look_decides_and_has_its_time() -> None:
    """A missing object is missing, not unavailable, and an object that appears at the last moment counts."""

    class Slow(Peer):
        looks = 0

        async def head(self, key: str) -> ObjectInfo:
            self.looks += 1
            await asyncio.sleep(0.1)
            return await super().head(key)

    peer = Slow(3)
    assert await judge(peer, patience=0.0, closes_in=0.35) is Reason.MISSING
    assert peer.looks >= 3

    late = Slow(3)
    await late.commit()

    async def appear() -> None:
        await asyncio.sleep(0.3)
        await late.upload()

    appearing = asyncio.create_task(appear())
    assert await judge(late, patience=0.0, closes_in=0.35) == body_of(3)
    await appearing


class Dripping(Peer):
    """Answers a HEAD, but never sends the body."""

    async def get(self, key: str, **options: Any) -> bytes:
        await asyncio.Event().wait()
        return await super().get(key, **options)


async def test_a_body_ends_when_it_could_have_come_at_the_lowest_speed() -> None:
    peer = Dripping(3)
    await peer.commit()
    await peer.upload()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await judge(peer, patience=0.0) is Reason.UNAVAILABLE
    assert loop.time() - began < gather_module.ANSWER_SECONDS + RULES.transfer + 1.0


async def test_buckets_that_stall_give_their_slots_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "CONCURRENCY", 2)
    monkeypatch.setattr(gather_module, "ATTEMPT_SECONDS", 0.05)
    stores: dict[int, MemoryStore] = {uid: Stalling(uid) for uid in range(8)}
    stores |= {8: await honest(8), 9: await honest(9)}
    result = await gather(stores, dataclasses.replace(RULES, patience=0.7))
    assert [one.uid for one in result.updates] == [8, 9]
    assert set(result.skipped.values()) == {Reason.UNAVAILABLE}


async def test_an_update_in_parts_is_refused() -> None:
    class Parts(Peer):
        async def head(self, key: str) -> ObjectInfo:
            info = await super().head(key)
            return dataclasses.replace(info, etag=f"{info.etag}-2") if key.startswith("gradient") else info

    peer = Parts(3)
    await peer.commit()
    await peer.upload()
    assert await judge(peer) is Reason.MALFORMED


async def test_a_commit_in_parts_does_not_count() -> None:
    class Parts(Peer):
        async def head(self, key: str) -> ObjectInfo:
            info = await super().head(key)
            return dataclasses.replace(info, etag=f"{info.etag}-1") if key.startswith("commit") else info

    peer = Parts(3)
    await peer.commit()
    await peer.upload()
    assert await judge(peer) is Reason.NO_COMMIT


async def test_commit_at_the_start_counts_and_a_later_one_does_not() -> None:
    # Time stamps are truncated to seconds, so an object of T0 may have been written before the start at T0 + 0.4.
    for stamp, verdict in ((T0, body_of(3)), (T0 + 1, Reason.NO_COMMIT)):
        peer = Peer(3)
        await peer.commit(at=stamp)
        await peer.upload()
        assert await judge(peer) == verdict


async def test_a_copy_of_another_ones_update_does_not_count() -> None:
    """The copier sees the original only after the start, when it is too late to commit to it."""
    copier = Peer(3)
    await copier.commit(sha256=hashlib.sha256(b"its own").hexdigest())
    await copier.upload(body=body_of(1))
    assert await judge(copier) is Reason.HASH_MISMATCH
    await copier.commit(at=T0 + 3, sha256=hashlib.sha256(body_of(1)).hexdigest())
    assert await judge(copier) is Reason.NO_COMMIT


async def test_uids_are_reported_in_order() -> None:
    stores = {uid: await honest(uid) for uid in (9, 2, 4)}
    result = await gather({**stores, 30: None}, RULES)
    assert [one.uid for one in result.updates] == [2, 4, 9]
    assert result.skipped == {30: Reason.NO_BUCKET}


async def test_a_hash_that_is_known_takes_the_place_of_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the body is hashed once."""
    hashed: list[str] = []
    monkeypatch.setattr(gather_module, "body_etag", lambda body, like: hashed.append("md5") or "")
    peer = Peer(3)
    await peer.upload()
    right = {uid: hashlib.sha256(body_of(uid)).hexdigest() for uid in (1, 3, 5)}
    assert await judge(peer, require_commit=False, sha256s=right) == body_of(3)
    assert hashed == []


async def test_another_object_than_the_one_that_is_known_is_refused() -> None:
    peer = Peer(3)
    await peer.upload()
    sha256s = {1: hashlib.sha256(body_of(1)).hexdigest(), 3: "0" * 64, 5: hashlib.sha256(body_of(5)).hexdigest()}
    assert await judge(peer, require_commit=False, sha256s=sha256s) is Reason.HASH_MISMATCH
