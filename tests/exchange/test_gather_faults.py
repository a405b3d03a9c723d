"""Packed updates over HTTP while buckets fail: each fault has its verdict, and no other peer loses its place."""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

from tplr.chain.commitment import decode_commitment
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, build
from tplr.exchange import gather as gather_module
from tplr.exchange.gather import GatherResult, gather
from tplr.exchange.updates import UpdateRules, put_commit, put_update
from tplr.keys import commit_key, gradient_key
from tplr.schemas import Bucket, ObjectInfo, Reason, UploadBounds
from tplr.storage import ObjectStore, S3Connections, TransferLimits, s3_errors, s3_store
from tplr.testing.s3server import Delay, Drip, FlipBit, Reset, Rules, Server, Status, Truncate, serve
from tplr.testing.s3server.faults import Action

WINDOW, VERSION = 7, "1"
T0 = 1_700_000_000.0
BOUNDS = UploadBounds(start=T0 + 0.4, end=T0 + 10.4)
HONEST = (0, 40, 63)  # lowest, middle and highest uid
UIDS = range(64)
SPEC = PayloadSpec.of({"w": (256, 256), "b": (64,)}, outer="demo", target_chunk=64, topk=32, bits=2)


def bucket_of(uid: int) -> Bucket:
    digits = f"{uid:032x}"
    return Bucket(name=f"peer-{uid}", account_id=digits, access_key_id=digits, secret_access_key=digits * 2)


def key_table(uids: range | list[int] = UIDS) -> dict[str, object]:
    return {
        bucket_of(uid).access_key_id: {
            "secret": bucket_of(uid).secret_access_key,
            "buckets": {bucket_of(uid).name: "read-write"},
        }
        for uid in uids
    }


def packed(uid: int, *, window: int = WINDOW) -> bytes:
    generator = torch.Generator().manual_seed(uid)
    coefficients = {}
    for name, place in SPEC.tensors.items():
        order = torch.rand(place.grid.chunks, place.grid.entries, generator=generator).argsort(dim=1)
        values = torch.randn(place.grid.chunks, place.k, generator=generator)
        coefficients[name] = order[:, : place.k].sort(dim=1).values, values
    return build(coefficients, SPEC, window=window, uid=uid, pages_digest="0a" * 32, batches=3)


class Buckets:
    """A server with a bucket for every uid, and this process's connections to it."""

    def __init__(self, server: Server, connections: S3Connections) -> None:
        self.server = server
        self.connections = connections
        self.now = T0
        self.stores: dict[int, ObjectStore | None] = {}

    async def publish(
        self, uid: int, *, at: float = T0 + 2, body: bytes | None = None, committed: bytes | None = None
    ) -> None:
        """Publish like an honest peer, except for the given changes."""
        store = self.stores[uid] = self.connections.store(bucket_of(uid))
        body = packed(uid) if body is None else body
        self.now = T0 - 3
        sha256 = hashlib.sha256(body if committed is None else committed).hexdigest()
        await put_commit(store, WINDOW, uid, sha256, VERSION)
        self.now = at
        await put_update(store, WINDOW, uid, body, VERSION, deadline_seconds=30)

    def fault(self, uid: int, method: str, action: Action, times: int | None) -> None:
        """Add a fault to requests for the update of ``uid``."""
        self.server.faults.add(f"^{method} /{bucket_of(uid).name}/gradient", action, times=times)

    async def gather(self, patience: float) -> GatherResult[Update]:
        rules = UpdateRules(
            window=WINDOW,
            version=VERSION,
            bounds=BOUNDS,
            closes_in=-1.0,
            patience=patience,
            size=SPEC.expected_size,
            spec=SPEC,
            require_commit=True,
        )
        async with asyncio.timeout(patience + 10):
            return await gather(self.stores, rules)


@pytest.fixture
async def buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buckets]:
    """Fails a test that leaves a task or a socket behind."""
    monkeypatch.setattr(gather_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(s3_errors, "_THROTTLED_SECONDS", 0.1)
    tasks, sockets = asyncio.all_tasks(), open_sockets()
    made: list[Buckets] = []
    rules = Rules(one_write_per_second=False, max_clock_skew=1e12)
    limits = TransferLimits(call_seconds=1.0, grace_seconds=0.3)
    async with (
        serve(tmp_path, key_table(), rules=rules, clock=lambda: made[0].now) as server,
        S3Connections(server.endpoint, limits=limits) as connections,
    ):
        made.append(Buckets(server, connections))
        yield made[0]
    for _ in range(40):  # the server's side of a closed connection
        await asyncio.sleep(0.05)
        if open_sockets() == sockets:
            break
    left = asyncio.all_tasks() - tasks - {asyncio.current_task()}
    # A server request that hangs because of a fault is not counted.
    assert [task for task in left if "RequestHandler" not in repr(task.get_coro())] == []
    assert open_sockets() == sockets


def open_sockets() -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(descriptor.readlink()).startswith("socket:")
    return count


def assert_found(result: GatherResult[Update], uids: list[int]) -> None:
    assert [one.uid for one in result.updates] == sorted(uids)
    for one in result.updates:
        assert one.update.body == packed(one.uid)
        assert one.sha256 == hashlib.sha256(one.update.body).hexdigest()


FAULTS: dict[str, tuple[str, Action]] = {
    "reset before the answer": ("HEAD", Reset()),
    "reset in the body": ("GET", Truncate(100, reset=True)),
    "truncated body": ("GET", Truncate(100)),
    "500": ("HEAD", Status(500)),
    "503 SlowDown": ("GET", Status(503, "SlowDown")),
    "429": ("HEAD", Status(429, "TooManyRequests")),
    "slow drip": ("GET", Drip(50)),
    "hang of the answer": ("HEAD", Delay(3600)),
    "hang of the body": ("GET", Drip(0)),
    "flipped bit": ("GET", FlipBit(200)),
}


async def test_a_fault_that_passes_costs_nobody_its_place(buckets: Buckets) -> None:
    for uid in (*HONEST, *range(1, 1 + len(FAULTS))):
        await buckets.publish(uid)
    for uid, (method, action) in enumerate(FAULTS.values(), 1):
        # aiohttp itself retries once after a break before the answer.
        buckets.fault(uid, method, action, times=2 if isinstance(action, Reset) else 1)
    result = await buckets.gather(patience=15)
    assert result.skipped == {}
    assert_found(result, list(buckets.stores))


async def test_a_fault_that_lasts_is_unavailable_and_ends_with_patience(buckets: Buckets) -> None:
    for uid in (*HONEST, *range(1, 1 + len(FAULTS))):
        await buckets.publish(uid)
    for uid, (method, action) in enumerate(FAULTS.values(), 1):
        buckets.fault(uid, method, action, times=None)
    result = await buckets.gather(patience=2)
    verdicts = dict(zip(FAULTS, map(result.skipped.get, range(1, 1 + len(FAULTS))), strict=True))
    assert verdicts == dict.fromkeys(FAULTS, Reason.UNAVAILABLE)
    assert_found(result, list(HONEST))


class AfterHead:
    """A bucket with an action between the HEAD of the update and its download."""

    def __init__(self, store: ObjectStore, happens: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._happens = happens

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def head(self, key: str) -> ObjectInfo:
        info = await self._store.head(key)
        if key.startswith("gradient"):
            await self._happens()
        return info


@contextlib.asynccontextmanager
async def header_bomb() -> AsyncIterator[str]:
    """A server that answers with headers without end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while not writer.is_closing():
                writer.write(b"x-%d: " % id(reader) + b"y" * 2**16 + b"\r\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_what_a_peer_may_do_has_its_reason(buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    def bucket_on_chain(account_id: str) -> Bucket | None:
        with contextlib.suppress(ValueError):
            return decode_commitment(account_id.ljust(32, "0") + "1" * 96)
        return None

    async def swap() -> None:
        await swapped.put(gradient_key(WINDOW, 3, VERSION), packed(3, window=8))

    async def revoke() -> None:
        buckets.server.keys.replace(key_table([uid for uid in UIDS if uid != 4]))

    for uid in HONEST:
        await buckets.publish(uid)
    await buckets.publish(1, at=T0 - 1)
    await buckets.publish(2, at=T0 + 11)
    for uid in (3, 4):
        await buckets.publish(uid)
    swapped, revoked = (buckets.connections.store(bucket_of(uid)) for uid in (3, 4))
    buckets.stores[3] = AfterHead(swapped, swap)  # pyright: ignore[reportArgumentType] - the rest is delegated
    buckets.stores[4] = AfterHead(revoked, revoke)  # pyright: ignore[reportArgumentType]
    buckets.stores[5] = buckets.connections.store(dataclasses.replace(bucket_of(5), name="nowhere"))
    body = packed(6)
    await buckets.publish(6, body=body[:300] + bytes([body[300] ^ 1]) + body[301:], committed=body)
    await buckets.publish(7, body=packed(8))
    await buckets.publish(8, body=packed(8, window=6))
    await buckets.publish(9, body=packed(9)[:-1])
    await buckets.publish(10, body=packed(10) + bytes(2**20))
    buckets.stores[11] = uncommitted = buckets.connections.store(bucket_of(11))
    await uncommitted.put(gradient_key(WINDOW, 11, VERSION), packed(11))
    buckets.stores[12] = buckets.connections.store(bucket_of(12))
    on_chain = bucket_on_chain("127.0.0.1:9000/")
    buckets.stores[13] = on_chain and buckets.connections.store(on_chain)
    monkeypatch.setattr(s3_store, "check_metadata", lambda metadata: dict(metadata or {}))
    await buckets.publish(14)
    large = buckets.connections.store(bucket_of(14))
    buckets.now = T0 - 3
    await large.put(commit_key(WINDOW, 14, VERSION), b"", metadata={"sha256": "f" * 8100})
    await buckets.publish(16)
    crowded = buckets.connections.store(bucket_of(16))
    await crowded.put(gradient_key(WINDOW, 16, VERSION), packed(16), metadata={f"m{n}": "" for n in range(120)})
    async with (
        header_bomb() as endpoint,
        S3Connections(endpoint, limits=TransferLimits(call_seconds=0.5)) as elsewhere,
    ):
        buckets.stores[15] = elsewhere.store(bucket_of(15))
        result = await buckets.gather(patience=2)

    assert result.skipped == {
        1: Reason.TOO_EARLY,
        2: Reason.TOO_LATE,
        3: Reason.MALFORMED,  # another object than that of the HEAD
        4: Reason.DENIED,  # revoked in mid-run
        5: Reason.MISSING,  # no such bucket
        6: Reason.HASH_MISMATCH,
        7: Reason.MALFORMED,  # another uid's
        8: Reason.MALFORMED,  # another window's
        9: Reason.WRONG_SIZE,
        10: Reason.WRONG_SIZE,
        11: Reason.NO_COMMIT,
        12: Reason.MISSING,
        13: Reason.NO_BUCKET,  # the account id on chain was a host name
        14: Reason.HASH_MISMATCH,  # metadata as large as R2 takes
        15: Reason.UNAVAILABLE,  # headers without end
        16: Reason.MALFORMED,  # more pieces of metadata than HTTP clients take
    }
    assert_found(result, list(HONEST))
