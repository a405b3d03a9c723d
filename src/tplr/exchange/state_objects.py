"""State dicts in buckets, as callers of the documented ``Comms`` know them: put one, get one, gather several."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
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

# What is missing is looked for during this part of a time-out; the rest is for a last look, and for stumbling buckets.
LOOKING = 0.8


@dataclass(frozen=True, kw_only=True)
class StateGather:
    """What was found. Everything by uid is in the order of ``uids``, which ascend.

    Attributes:
        state_dict: name to the values of all ``uids``; None where a uid sent no such name.
        skipped_uids: why each other uid is not among them.
        success_rate: found, of those asked for; 0 if nobody was.
        upload_bytes: put by this node since its last gather.
        time: seconds that the gather took.
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
    """Publish a state in one PUT. Raises StoreError, or ValueError as ``encode_state``."""
    body = await asyncio.to_thread(encode_state, state_dict, global_step)
    seconds = TransferLimits.call_seconds + len(body) / TransferLimits.upload_floor
    return await with_retry(lambda: store.put(key, body), deadline_seconds=seconds)


async def get_state(store: ObjectStore, key: str, *, max_bytes: int) -> State:
    """Read a state, asked for once. Raises as ``ObjectStore.get`` and ``decode_state``."""
    return await asyncio.to_thread(decode_state, await store.get(key, max_bytes=max_bytes))


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
) -> GatherRules[State]:
    """By which states are gathered.

    Args:
        max_bytes: of one object.
        timeout: seconds after which every uid has its verdict (and what ``max_bytes`` take at the lowest speed).
        totalks: as in ``parse_sparse``; None takes any tensors that are finite.
        device: where the tensors go.
        time_min, time_max: when a state may have been written, by the store's clock, both included; UTC if naive.
    """
    return GatherRules(
        window=window,
        key_of=lambda uid: state_key(kind, window, uid, version),
        commit_key_of=None,
        bounds=UploadBounds(_seconds(time_min, float("-inf")), _seconds(time_max, float("inf"))),
        closes_in=LOOKING * timeout,
        patience=(1 - LOOKING) * timeout,
        size=max_bytes,
        or_less=True,
        parse=lambda body, _: parse_sparse(body, totalks, device),
    )


async def gather_states(
    uids: Iterable[int], store_of: Callable[[int], ObjectStore | None], rules: GatherRules[State], *, upload_bytes: int
) -> StateGather:
    """Fetch and judge the states of ``uids``, as ``gather``."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await gather(uids, store_of, rules)
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
