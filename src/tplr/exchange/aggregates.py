"""The included set of a window, which every node applies, and the aggregate that holds its updates.

The *included set* is decided right after the time bound (``exchange/quorum.py``); it is small and never changes. The
*aggregate* is the concatenation of the packed updates: with it a node can apply the window at any later time. A reader
checks each update against its hash in the set, so it does not need to trust the server of the aggregate.
"""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import FailFast, Field

from tplr.errors import ObjectNotFound, PayloadError
from tplr.exchange.first_answer import find_first
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.keys import state_key, version_at
from tplr.schemas import DebugReport, Items, ObjectInfo, ReasonText, Sha256, Uid, UidText, Window, Wire
from tplr.storage import ObjectStore, TransferLimits, upload_file
from tplr.storage.base import MAX_PUT_BYTES
from tplr.storage.local_files import disk_errors
from tplr.storage.retry import with_retry

PUT_SECONDS = 60.0


class Included(Wire):
    """One update of a window: SHA-256 and size in bytes of the object."""

    uid: Uid
    sha256: Sha256
    size: Annotated[int, Field(ge=0, lt=2**53)]


class IncludedSet(Wire):
    """The updates of a window by ascending uid, and the reason for each missing one; part of a decision.

    Attributes:
        success_rate: included updates over peers on the list; 0 for an empty list.
    """

    window: Window
    version: Annotated[str, Field(max_length=64)]
    included: Items[Included] = Field(max_length=4096)
    skipped: Annotated[dict[UidText, ReasonText], FailFast()] = Field(max_length=4096)
    success_rate: Annotated[float, Field(ge=0, le=1)]

    def describe(self) -> str:
        """Return its uids and the size of their updates, as text for the log."""
        size = sum(one.size for one in self.included)
        return f"uids {[one.uid for one in self.included]}, {size / 1e6:.2f} MB"


def reported_set(report: DebugReport, version: str, *, size: int) -> IncludedSet:
    """Return the included set of the updates that a node reports as applied; ``size``: of one update, in bytes."""
    hashes = sorted((int(uid), sha256) for uid, sha256 in report.included.items())
    return IncludedSet(
        window=report.window,
        version=version_at(version, report.window),
        included=tuple(Included(uid=uid, sha256=sha256, size=size) for uid, sha256 in hashes),
        skipped=report.skipped,
        success_rate=len(hashes) / (len(hashes) + len(report.skipped)) if hashes else 0.0,
    )


def assemble(included: IncludedSet, bodies: Sequence[bytes]) -> bytes:
    """Return the aggregate: the header, then the updates in the order of the set."""
    return b"".join([_head(included), *bodies])


async def put_aggregate(store: ObjectStore, included: IncludedSet, body: bytes) -> ObjectInfo:
    """Publish an aggregate that ``assemble`` returned, above ``MAX_PUT_BYTES`` in parts. Raises StoreError."""
    key = state_key("aggregator", included.window, 0, included.version)
    seconds = PUT_SECONDS + len(body) / TransferLimits.upload_floor
    if len(body) <= MAX_PUT_BYTES:
        return await with_retry(lambda: store.put(key, body), deadline_seconds=seconds)
    with disk_errors(store.name, key), tempfile.TemporaryDirectory(prefix="tplr-aggregate-") as folder:
        path = Path(folder) / "aggregate"
        await asyncio.to_thread(path.write_bytes, body)
        return await upload_file(store, key, path, deadline_seconds=seconds)


async def get_aggregate(store: ObjectStore, included: IncludedSet) -> list[bytes] | None:
    """Fetch the updates of a set, in its order, verified by their hashes; None if there is no aggregate.

    Raises:
        PayloadError: the object is not the aggregate of this set.
        StoreError: as ``ObjectStore.get``; an object of another size is not fetched.
    """
    info = await _look(store, included)
    return None if info is None else await _fetch(store, info, included)


async def _look(store: ObjectStore, included: IncludedSet) -> ObjectInfo | None:
    """Describe a store's aggregate; None if there is none. Raises PayloadError if its size does not match the set."""
    size = len(_head(included)) + sum(one.size for one in included.included)
    key = state_key("aggregator", included.window, 0, included.version)
    try:
        info = await store.head(key)
    except ObjectNotFound:
        return None
    if info.size != size:
        raise PayloadError(f"{key}: {info.size} bytes, expected {size} for its set")
    return info


async def _fetch(store: ObjectStore, info: ObjectInfo, included: IncludedSet) -> list[bytes] | None:
    """Fetch the updates in the aggregate that ``_look`` found; None if it was deleted since then."""
    key = state_key("aggregator", included.window, 0, included.version)
    try:
        # ``split`` hashes each update.
        body = await store.get(key, max_bytes=info.size, if_match=info.etag, verify=False)
    except ObjectNotFound:
        return None
    return await asyncio.to_thread(split, key, body, included)


def place_in_aggregate(included: IncludedSet, uid: int) -> tuple[str, int]:
    """Return the key of a set's aggregate, and the offset of an update in it. Raises ValueError for another uid.

    For reading a part of an update, whose hash can't be checked.
    """
    before = [one.uid for one in included.included].index(uid)
    start = len(_head(included)) + sum(one.size for one in included.included[:before])
    return state_key("aggregator", included.window, 0, included.version), start


async def find_aggregate(
    stores: Mapping[str, ObjectStore], included: IncludedSet, speeds: SourceSpeeds
) -> list[bytes] | None:
    """Fetch the updates as ``get_aggregate`` from the fastest of ``stores``, by owner, with a valid aggregate.

    Raises only if no store has a valid one. Does not wait for stores that do not answer: ``first_answer.find_first``.
    """
    look, fetch = partial(_look, included=included), partial(_fetch, included=included)
    return await find_first(stores, look, fetch, speeds, what=f"aggregate of window {included.window}")


def split(key: str, body: bytes, included: IncludedSet) -> list[bytes]:
    """Split an aggregate into its updates, in the set's order. Raises PayloadError if a hash differs from the set's."""
    head = _head(included)
    if body[: len(head)] != head:
        raise PayloadError(f"{key}: its header does not match its set")
    bodies, start = [], len(head)
    for one in included.included:
        part = body[start : start + one.size]
        if hashlib.sha256(part).hexdigest() != one.sha256:
            raise PayloadError(f"{key}: uid {one.uid}: its hash differs from the one in its set")
        bodies.append(part)
        start += one.size
    return bodies


def _head(included: IncludedSet) -> bytes:
    """Return the safetensors header, which has one encoding for each set; each update is a tensor named by its uid."""
    header: dict[str, object] = {
        "__metadata__": {"format": "tplr-aggregate-1", "window": str(included.window), "version": included.version}
    }
    start = 0
    for one in included.included:
        offsets = [start, start + one.size]
        header[f"{one.uid:05d}"] = {"dtype": "U8", "shape": [one.size], "data_offsets": offsets}
        start += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
