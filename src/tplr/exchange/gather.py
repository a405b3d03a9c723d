"""Fetch the peers' updates of a window and judge each alone: whatever one sends, the others still count."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tplr.errors import AccessDenied, ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.keys import commit_key, gradient_key
from tplr.logging import logger
from tplr.schemas import ObjectInfo, Reason, UploadBounds
from tplr.storage import ObjectStore

T = TypeVar("T")

# A store's clock may run this far behind the chain's, and its stamps are cut off to whole seconds: look once more this
# long after the bound, so that nobody calls missing what another node finds.
SETTLE_SECONDS = 2.0
POLL_SECONDS = 0.5
CONCURRENCY = 16

HASH_FIELD = "sha256"  # user metadata of a commit object


@dataclass(frozen=True)
class GatheredUpdate(Generic[T]):
    """One peer's update, fetched whole, within the bounds, valid."""

    uid: int
    update: T
    sha256: str
    size: int


@dataclass(frozen=True)
class GatherResult(Generic[T]):
    """What a node found for a window: updates by ascending uid, and why each other peer is not among them."""

    window: int
    updates: tuple[GatheredUpdate[T], ...]
    skipped: dict[int, Reason]

    @property
    def bytes(self) -> int:
        """Size of all updates together."""
        return sum(gathered.size for gathered in self.updates)


class _Refused(Exception):
    """Ends the fetch of one peer with a reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(detail or reason.value)


@dataclass(frozen=True, kw_only=True)
class GatherRules(Generic[T]):
    """What an update must be to count, and how long to wait for it.

    Attributes:
        bounds: when it may have been written.
        closes_in: seconds from now until ``bounds.end`` by the chain's clock; negative for windows long past.
        patience: seconds after that during which a bucket that does not answer is asked again.
        size: exact size of an update in bytes.
        parse: bytes and uid to an update; raises PayloadError. Called in a thread.
        require_commit: refuse an update whose hash was not published before ``bounds.start``.
    """

    window: int
    version: str
    bounds: UploadBounds
    closes_in: float
    patience: float
    size: int
    parse: Callable[[bytes, int], T]
    require_commit: bool


async def gather(
    uids: Iterable[int], store_of: Callable[[int], ObjectStore | None], rules: GatherRules[T]
) -> GatherResult[T]:
    """Fetch and judge the updates of ``uids``; returns when each has a verdict.

    A peer whose update is there costs two or three requests. One that has none is asked until the time bound has
    passed, one whose bucket does not answer until patience ends.
    """
    slots = asyncio.Semaphore(CONCURRENCY)
    opened_at = asyncio.get_running_loop().time()
    order = sorted(set(uids))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_judge(uid, store_of(uid), rules, slots, opened_at)) for uid in order]
    verdicts = dict(zip(order, (task.result() for task in tasks), strict=True))
    return GatherResult(
        window=rules.window,
        updates=tuple(found for found in verdicts.values() if isinstance(found, GatheredUpdate)),
        skipped={uid: reason for uid, reason in verdicts.items() if isinstance(reason, Reason)},
    )


async def _judge(
    uid: int, store: ObjectStore | None, rules: GatherRules[T], slots: asyncio.Semaphore, opened_at: float
) -> GatheredUpdate[T] | Reason:
    """One peer's update, or the reason why it does not count."""
    if store is None:
        return Reason.NO_BUCKET
    loop = asyncio.get_running_loop()
    # A window long past is closed already, but a bucket that stumbles still gets its time.
    closed_at = opened_at + max(0.0, rules.closes_in + SETTLE_SECONDS)
    while True:
        began = loop.time()
        try:
            async with slots:
                return await _fetch(uid, store, rules)
        except _Refused as refusal:
            logger.info("uid %d: update refused: %s", uid, refusal)
            return refusal.reason
        except StoreError as error:
            reason, patience = _meaning(error, rules.patience)
            if began >= closed_at + patience:
                logger.info("uid %d: %s: %s", uid, reason, error)
                return reason
        await asyncio.sleep(POLL_SECONDS)


def _meaning(error: StoreError, patience: float) -> tuple[Reason, float]:
    """What an error says of a peer in the end, and how long after the bound it is given to pass."""
    match error:
        case ObjectNotFound():
            return Reason.MISSING, 0.0
        case AccessDenied():
            return Reason.DENIED, 0.0
        case StoreUnavailable():
            return Reason.UNAVAILABLE, patience
        case _:  # swapped between two requests, or longer than it said
            return Reason.MALFORMED, 0.0


async def _fetch(uid: int, store: ObjectStore, rules: GatherRules[T]) -> GatheredUpdate[T]:
    info = await store.head(gradient_key(rules.window, uid, rules.version))
    if verdict := rules.bounds.judge(info.last_modified):
        raise _Refused(verdict, f"written at {info.last_modified:.0f}, allowed {rules.bounds}")
    if info.size != rules.size:
        raise _Refused(Reason.WRONG_SIZE, f"{info.size} bytes, expected exactly {rules.size}")
    committed = await _committed_hash(uid, store, rules) if rules.require_commit else None
    body = await store.get(info.key, max_bytes=rules.size, if_match=info.etag)
    return await asyncio.to_thread(_check_body, uid, info, body, committed, rules)


async def _committed_hash(uid: int, store: ObjectStore, rules: GatherRules[T]) -> str:
    try:
        commit = await store.head(commit_key(rules.window, uid, rules.version))
    except ObjectNotFound:
        raise _Refused(Reason.NO_COMMIT, "no commit object") from None
    if commit.last_modified > rules.bounds.start:
        raise _Refused(Reason.NO_COMMIT, f"committed at {commit.last_modified:.0f}, after {rules.bounds.start:.3f}")
    return commit.metadata.get(HASH_FIELD, "")


def _check_body(
    uid: int, info: ObjectInfo, body: bytes, committed: str | None, rules: GatherRules[T]
) -> GatheredUpdate[T]:
    sha256 = hashlib.sha256(body).hexdigest()
    if committed is not None and sha256 != committed:
        raise _Refused(Reason.HASH_MISMATCH, f"sha256 {sha256[:12]}…, committed to {committed[:12]!r}…")
    try:
        return GatheredUpdate(uid, rules.parse(body, uid), sha256, info.size)
    except PayloadError as error:
        raise _Refused(Reason.MALFORMED, error.reason) from error
