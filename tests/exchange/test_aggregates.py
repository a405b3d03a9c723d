"""Included sets and aggregates: written once, read back exactly, any other object refused before it is fetched."""

import hashlib
import time
from typing import Any

import pytest
from included import included_set
from safetensors import safe_open

from tplr.errors import AccessDenied, ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.exchange.aggregates import (
    Included,
    IncludedSet,
    assemble,
    find_aggregate,
    get_aggregate,
    put_aggregate,
)
from tplr.exchange.first_answer import ANSWER_SECONDS, PATIENCE_SECONDS
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.keys import included_key, parse_window_key, state_key
from tplr.schemas import Reason
from tplr.storage import MemoryStore
from tplr.testing.s3server import Delay

BODIES = {2: b"two" * 50, 3: b"", 11: bytes(range(256))}


def gathered() -> GatherResult[None]:
    updates = tuple(
        GatheredUpdate(uid, None, hashlib.sha256(body).hexdigest(), len(body)) for uid, body in BODIES.items()
    )
    return GatherResult(window=7, updates=updates, skipped={1: Reason.MISSING})


SET = included_set(gathered(), "1")
KEY = state_key("aggregator", 7, 0, "1")


async def test_an_aggregate_is_its_updates(tmp_path) -> None:
    store = MemoryStore()
    assert await get_aggregate(store, SET) is None
    await put_aggregate(store, SET, assemble(SET, list(BODIES.values())))
    assert await get_aggregate(store, SET) == list(BODIES.values())
    # Any reader of safetensors finds them by uid.
    path = tmp_path / "aggregate"
    path.write_bytes(await store.get(KEY, max_bytes=10_000))
    with safe_open(path, "pt") as file:
        assert {int(name): bytes(file.get_tensor(name)) for name in file.keys()} == BODIES  # noqa: SIM118
        assert file.metadata()["window"] == "7"
    assert parse_window_key(KEY, "1") is not None
    assert parse_window_key(included_key(7, "1"), "1") is not None


async def test_the_first_aggregate_that_is_right_is_taken() -> None:
    none, false, right = MemoryStore(), MemoryStore(), MemoryStore()
    body = assemble(SET, list(BODIES.values()))
    await false.put(KEY, body[:-1] + b"x")
    assert await find_aggregate({"none": none}, SET, SourceSpeeds()) is None
    stores = {"none": none, "false": false, "right": right}
    with pytest.raises(PayloadError, match="aggregator-7"):
        await find_aggregate(stores, SET, SourceSpeeds())
    await right.put(KEY, body)
    assert await find_aggregate(stores, SET, SourceSpeeds()) == list(BODIES.values())


@pytest.mark.parametrize("error", [ObjectNotFound, AccessDenied, None], ids=["missing", "denied", "false bytes"])
async def test_who_answers_only_head_is_asked_last_from_then_on(error: type[StoreError] | None) -> None:
    """Also a source that has sent aggregates before."""
    asked: list[str] = []

    class Noted(MemoryStore):
        lies = False

        async def get(self, key: str, **more: Any) -> bytes:
            asked.append(self.name)
            if self.lies and error:
                raise error("no GET", bucket=self.name, key=key)
            body = await super().get(key, **more)
            return body[:-1] + b"x" if self.lies else body

    liar, right, speeds = Noted("liar"), Noted("right"), SourceSpeeds()
    for store in (liar, right):
        await store.put(KEY, assemble(SET, list(BODIES.values())))
    for sent_before in (False, True):
        if sent_before:
            speeds.note("liar", size=10**12, seconds=1.0)
        liar.lies = True
        asked.clear()
        for _ in range(3):
            assert await find_aggregate({"liar": liar, "right": right}, SET, speeds) == list(BODIES.values())
        assert asked == ["liar", "right", "right", "right"]


@pytest.mark.parametrize(("method", "hanging"), [("HEAD", 3), ("GET", 1)])
async def test_a_bucket_that_hangs_costs_little(served, method, hanging) -> None:
    """The hanging bucket is asked first, on a real server; the buckets of the others answer."""
    right = MemoryStore()
    stores = {f"hangs-{number}": served.store for number in range(hanging)} | {"none": MemoryStore()}
    body = assemble(SET, list(BODIES.values()))
    await served.store.put(KEY, body)
    served.server.faults.add(f"^{method} ", Delay(3600), times=None)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):  # the bucket may have it, so the window is not lost
        await find_aggregate(stores, SET, SourceSpeeds())
    assert time.monotonic() - began < ANSWER_SECONDS + PATIENCE_SECONDS + 2
    await right.put(KEY, body)
    stores["right"] = right
    began = time.monotonic()
    speeds = SourceSpeeds()
    assert await find_aggregate(stores, SET, speeds) == list(BODIES.values())
    passed = time.monotonic() - began
    if method == "HEAD":  # the others are asked soon, all at once
        assert PATIENCE_SECONDS <= passed < PATIENCE_SECONDS + 2
    order = speeds.order(stores)
    assert order.index("right") < order.index("hangs-0")  # in the next window


async def test_who_answers_late_is_taken_if_nobody_else_has_it(served) -> None:
    await served.store.put(KEY, assemble(SET, list(BODIES.values())))
    served.server.faults.add("^HEAD ", Delay(2 * PATIENCE_SECONDS))
    stores = {"late": served.store, "none": MemoryStore()}
    assert await find_aggregate(stores, SET, SourceSpeeds()) == list(BODIES.values())


async def test_one_that_answers_spares_the_others(served) -> None:
    right = MemoryStore()
    await right.put(KEY, assemble(SET, list(BODIES.values())))
    stores = {"none": MemoryStore(), "right": right, "spared": served.store}
    assert await find_aggregate(stores, SET, SourceSpeeds()) == list(BODIES.values())
    assert served.requests == []


async def test_nobody_included() -> None:
    store, empty = MemoryStore(), included_set(GatherResult(window=7, updates=(), skipped={}), "1")
    assert empty.success_rate == 0
    await put_aggregate(store, empty, assemble(empty, []))
    assert await get_aggregate(store, empty) == []


async def test_every_changed_byte_is_found() -> None:
    store = MemoryStore()
    await put_aggregate(store, SET, assemble(SET, list(BODIES.values())))
    right = await store.get(KEY, max_bytes=10_000)
    for position in range(0, len(right), 7):
        wrong = bytearray(right)
        wrong[position] ^= 16
        await store.put(KEY, bytes(wrong))
        with pytest.raises(PayloadError, match="aggregator-7"):
            await get_aggregate(store, SET)
    await store.put(KEY, right + b"x")
    with pytest.raises(PayloadError, match=r"expected \d+ for its set"):
        await get_aggregate(store, SET)


def test_a_set_has_bounds() -> None:
    with pytest.raises(ValueError, match="included"):
        IncludedSet(
            window=7,
            version="1",
            included=tuple(Included(uid=uid, sha256="0" * 64, size=1) for uid in range(5000)),
            skipped={},
            success_rate=1.0,
        )
