"""State dicts in buckets, for the documented ``Comms`` methods: put one, get one, gather several."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tplr.errors import ObjectNotFound, StoreUnavailable
from tplr.exchange.documents import READ_SECONDS
from tplr.exchange.gather import CONCURRENCY as PEERS_AT_ONCE
from tplr.exchange.gather import GatherRules, gather
from tplr.exchange.states import State, decode_state, encode_state, parse_state, state_bytes, write_state
from tplr.keys import StateKind, state_key
from tplr.schemas import ANYTIME, ObjectInfo, Reason, UploadBounds
from tplr.storage import ObjectStore, TransferLimits, upload_file
from tplr.storage.base import check_announced
from tplr.storage.parts import PART_RULE, body_etag
from tplr.storage.retry import with_retry
from tplr.storage.upload import CONCURRENCY as PARTS_AT_ONCE

# Share of a timeout in which missing objects are polled; the rest is for a last attempt and for buckets with errors.
LOOKING = 0.8
# Larger states are uploaded in parts: a PUT of 5 GiB fails, and an interrupted PUT starts from the beginning.
ONE_PUT_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class StateGather:
    """Gathered states. Lists by uid are in the order of ``uids``, which is ascending.

    Attributes:
        state_dict: name to the values of all ``uids``; None for a uid whose state lacks the name.
        skipped_uids: reason for each other uid.
        success_rate: found over requested uids; 0 if there were none.
        upload_bytes: uploaded by this node since its last gather.
        download_bytes: total size of all gathered objects.
        time: duration of the gather in seconds.
    """

    state_dict: dict[str, list[Any]]
    uids: tuple[int, ...]
    skipped_uids: dict[int, Reason]
    global_steps: tuple[int, ...]
    success_rate: float
    upload_bytes: int
    download_bytes: int
    time: float


async def put_state(
    store: ObjectStore,
    key: str,
    state_dict: Mapping[str, Any],
    global_step: int,
    *,
    concurrency: int = PARTS_AT_ONCE,
) -> ObjectInfo:
    """Publish a state in one PUT, or above ``ONE_PUT_BYTES`` in parts, ``concurrency`` at once.

    Raises:
        ValueError: as ``encode_state``.
        StoreError: the state is not published.
    """
    if state_bytes(state_dict) > ONE_PUT_BYTES:
        with tempfile.TemporaryDirectory(prefix="tplr-state-") as folder:
            path = Path(folder) / "state"
            await asyncio.to_thread(write_state, path, state_dict, global_step)
            return await upload_file(store, key, path, concurrency=concurrency)
    body = await asyncio.to_thread(encode_state, state_dict, global_step)
    seconds = TransferLimits.call_seconds + len(body) / TransferLimits.upload_floor
    return await with_retry(lambda: store.put(key, body), deadline_seconds=seconds)


async def get_state(store: ObjectStore, key: str, *, max_bytes: int, bounds: UploadBounds = ANYTIME) -> State:
    """Read a state. While the store is unavailable, requests are retried for up to ``READ_SECONDS``.

    Raises:
        ObjectNotFound: there is no object, or it was not written within ``bounds``.
        StoreError: as ``ObjectStore.get``.
        PayloadError: the object is not a state.
    """
    info = await with_retry(lambda: store.head(key), deadline_seconds=READ_SECONDS)
    if reason := bounds.judge(info.last_modified):
        text = f"{reason}: written at {info.last_modified:.0f}, allowed {bounds.start:.0f} to {bounds.end:.0f}"
        raise ObjectNotFound(text, bucket=store.name, key=key)
    check_announced(info.size, max_bytes, bucket=store.name, key=key)
    seconds = READ_SECONDS + info.size / TransferLimits.download_floor
    return await asyncio.to_thread(
        decode_state, await with_retry(lambda: _get_body(store, info), deadline_seconds=seconds)
    )


async def _get_body(store: ObjectStore, info: ObjectInfo) -> bytes:
    """Read the object's bytes. The ETag of an object uploaded in our parts is checked here, others by the store."""
    body = await store.get(info.key, max_bytes=info.size, if_match=info.etag)
    in_parts = info.in_parts and info.metadata.items() >= PART_RULE.items()
    if in_parts and await asyncio.to_thread(lambda: body_etag(body, like=info.etag)) != info.etag:
        raise StoreUnavailable("the body arrived damaged", bucket=store.name, key=info.key)
    return body


def time_bounds(time_min: datetime | None, time_max: datetime | None) -> UploadBounds:
    """Return inclusive bounds of the time of writing by the store's clock; naive times are UTC."""
    return UploadBounds(_seconds(time_min, ANYTIME.start), _seconds(time_max, ANYTIME.end))


@dataclass(frozen=True, kw_only=True)
class StateRules(GatherRules[State]):
    """Rules for the state dicts of a window; ``decode`` raises PayloadError."""

    kind: StateKind
    version: str
    decode: Callable[[bytes], State]

    def key(self, uid: int) -> str:
        return state_key(self.kind, self.window, uid, self.version)

    def parse(self, body: bytes, uid: int) -> State:
        return self.decode(body)


def state_rules(
    kind: StateKind,
    window: int,
    version: str,
    *,
    max_bytes: int,
    timeout: float,
    bounds: UploadBounds,
    decode: Callable[[bytes], State] = parse_state,
) -> StateRules:
    """Return the rules for a gather of states.

    Args:
        max_bytes: largest size of one object.
        timeout: seconds until every uid has a result; the time for ``max_bytes`` at the lowest speed is added.
    """
    return StateRules(
        window=window,
        kind=kind,
        version=version,
        decode=decode,
        bounds=bounds,
        closes_in=LOOKING * timeout,
        patience=(1 - LOOKING) * timeout,
        size=max_bytes,
        or_less=True,
    )


async def gather_states(
    stores: Mapping[int, ObjectStore | None],
    rules: StateRules,
    *,
    upload_bytes: int,
    concurrency: int = PEERS_AT_ONCE,
) -> StateGather:
    """Fetch and validate the states of several uids, as ``gather``."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await gather(stores, rules, concurrency=concurrency)
    states = [one.update for one in found.updates]
    asked = len(states) + len(found.skipped)
    return StateGather(
        state_dict=await asyncio.to_thread(_values_by_name, states),
        uids=tuple(one.uid for one in found.updates),
        skipped_uids=found.skipped,
        global_steps=tuple(state.global_step for state in states),
        success_rate=len(states) / asked if asked else 0.0,
        upload_bytes=upload_bytes,
        download_bytes=found.bytes,
        time=loop.time() - began,
    )


def _values_by_name(states: Sequence[State]) -> dict[str, list[Any]]:
    names = sorted({name for state in states for name in state.state_dict})
    return {name: [state.state_dict.get(name) for state in states] for name in names}


def _seconds(time: datetime | None, default: float) -> float:
    if time is None:
        return default
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
