"""State dicts in buckets, for the documented ``Comms`` methods: put one, get one, gather several."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from tplr.exchange.gather import GatherRules, gather
from tplr.exchange.states import State, decode_state, encode_state, parse_sparse
from tplr.keys import StateKind, state_key
from tplr.schemas import ObjectInfo, Reason, UploadBounds
from tplr.storage import ObjectStore, TransferLimits
from tplr.storage.retry import with_retry

# Part of a timeout in which missing objects are polled; the rest is for a last look, and for buckets with errors.
LOOKING = 0.8


@dataclass(frozen=True, kw_only=True)
class StateGather:
    """Gathered states. Lists by uid are in the order of ``uids``, which ascend.

    Attributes:
        state_dict: name to the values of all ``uids``; None for a uid that sent no such name.
        skipped_uids: reason for each other uid.
        success_rate: found over requested uids; 0 if there were none.
        upload_bytes: put by this node since its last gather.
        download_bytes: of all gathered objects.
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


async def put_state(store: ObjectStore, key: str, state_dict: Mapping[str, Any], global_step: int) -> ObjectInfo:
    """Publish a state in one PUT. Raises StoreError, and ValueError as ``encode_state``."""
    body = await asyncio.to_thread(encode_state, state_dict, global_step)
    seconds = TransferLimits.call_seconds + len(body) / TransferLimits.upload_floor
    return await with_retry(lambda: store.put(key, body), deadline_seconds=seconds)


async def get_state(store: ObjectStore, key: str, *, max_bytes: int) -> State:
    """Read a state, requested once. Raises as ``ObjectStore.get`` and ``decode_state``."""
    return await asyncio.to_thread(decode_state, await store.get(key, max_bytes=max_bytes))


@dataclass(frozen=True, kw_only=True)
class StateRules(GatherRules[State]):
    """Rules for the state dicts of a window; ``totalks`` and ``device`` as in ``parse_sparse``."""

    kind: StateKind
    version: str
    totalks: Mapping[str, int] | None
    device: torch.device | str

    def key(self, uid: int) -> str:
        return state_key(self.kind, self.window, uid, self.version)

    def parse(self, body: bytes, uid: int) -> State:
        return parse_sparse(body, self.totalks, self.device)


def state_rules(
    kind: StateKind,
    window: int,
    version: str,
    *,
    max_bytes: int,
    timeout: float,
    totalks: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
    time_min: datetime | None = None,
    time_max: datetime | None = None,
) -> StateRules:
    """Rules for a gather of states.

    Args:
        max_bytes: largest size of one object.
        timeout: seconds until every uid has a result, without the time that ``max_bytes`` take at the lowest speed.
        totalks: as in ``parse_sparse``; None accepts any finite tensors.
        device: of the tensors.
        time_min, time_max: bounds of the time of writing by the store's clock, inclusive; UTC if naive.
    """
    return StateRules(
        window=window,
        kind=kind,
        version=version,
        totalks=totalks,
        device=device,
        bounds=UploadBounds(_seconds(time_min, float("-inf")), _seconds(time_max, float("inf"))),
        closes_in=LOOKING * timeout,
        patience=(1 - LOOKING) * timeout,
        size=max_bytes,
        or_less=True,
    )


async def gather_states(
    stores: Mapping[int, ObjectStore | None], rules: StateRules, *, upload_bytes: int
) -> StateGather:
    """Fetch and validate the states of several uids, as ``gather``."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await gather(stores, rules)
    states = [one.update for one in found.updates]
    names = sorted({name for state in states for name in state.state_dict})
    asked = len(states) + len(found.skipped)
    return StateGather(
        state_dict={name: [state.state_dict.get(name) for state in states] for name in names},
        uids=tuple(one.uid for one in found.updates),
        skipped_uids=found.skipped,
        global_steps=tuple(state.global_step for state in states),
        success_rate=len(states) / asked if asked else 0.0,
        upload_bytes=upload_bytes,
        download_bytes=found.bytes,
        time=loop.time() - began,
    )


def _seconds(time: datetime | None, default: float) -> float:
    if time is None:
        return default
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
