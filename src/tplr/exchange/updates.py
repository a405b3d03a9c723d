"""Packed updates in buckets: the hash before the window's end, the bytes after it, and the rules of a gather."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from tplr.errors import ObjectNotFound
from tplr.exchange.gather import HASH_FIELD, GatherRules
from tplr.hparams import HParams
from tplr.keys import commit_key, gradient_key
from tplr.schemas import ObjectInfo, UploadBounds
from tplr.storage import ObjectStore
from tplr.storage.parts import md5_hex
from tplr.storage.retry import with_retry

T = TypeVar("T")

COMMIT_DEADLINE_SECONDS = 30.0
# The last look is this long after the bound, so that no node misses an update that another one finds: a store's clock
# may be this far behind the chain's, and its time stamps are truncated to whole seconds.
SETTLE_SECONDS = 2.0


async def put_commit(store: ObjectStore, window: int, uid: int, sha256: str, version: str) -> None:
    """Publish the hash of an update, before the window ends."""
    key = commit_key(window, uid, version)
    await _put_once(store, key, b"", {HASH_FIELD: sha256}, COMMIT_DEADLINE_SECONDS)


async def put_update(
    store: ObjectStore, window: int, uid: int, body: bytes, version: str, *, deadline_seconds: float
) -> ObjectInfo:
    """Publish an update in one PUT, so that LastModified has the same meaning on every server."""
    key = gradient_key(window, uid, version)
    return await _put_once(store, key, body, {}, deadline_seconds)


async def _put_once(
    store: ObjectStore, key: str, body: bytes, metadata: dict[str, str], deadline_seconds: float
) -> ObjectInfo:
    """Put an object with retries. An object whose PUT succeeded, but whose answer was lost, keeps its time."""
    tried = False

    async def put() -> ObjectInfo:
        nonlocal tried
        if tried:
            with contextlib.suppress(ObjectNotFound):
                there = await store.head(key)
                if (there.etag, there.metadata) == (await asyncio.to_thread(md5_hex, body), metadata):
                    return there
        tried = True
        return await store.put(key, body, metadata=metadata)

    return await with_retry(put, deadline_seconds=deadline_seconds)


def update_rules(
    window: int,
    bounds: UploadBounds,
    hparams: HParams,
    *,
    size: int,
    parse: Callable[[bytes, int], T],
    ended_ago: float,
) -> GatherRules[T]:
    """Rules for a gather of the updates of ``window``, which ended at least ``ended_ago`` seconds ago.

    Args:
        size: of an update in bytes, exactly.
        parse: bytes and uid to an update; raises PayloadError.
    """
    return GatherRules(
        window=window,
        key_of=lambda uid: gradient_key(window, uid, hparams.version),
        commit_key_of=(lambda uid: commit_key(window, uid, hparams.version)) if hparams.require_commit else None,
        bounds=bounds,
        closes_in=bounds.end - bounds.start + SETTLE_SECONDS - ended_ago,
        patience=hparams.gather_patience_seconds,
        size=size,
        parse=parse,
    )
