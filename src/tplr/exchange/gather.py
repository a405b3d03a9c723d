"""Fetches one object of every peer and validates each independently: no peer's object affects another's."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tplr.errors import AccessDenied, EmptyUpdate, ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.exchange.polling import pause_after
from tplr.logging import logger
from tplr.schemas import ANYTIME, ObjectInfo, Reason, UploadBounds
from tplr.storage import ObjectStore, TransferLimits
from tplr.storage.parts import body_etag

T = TypeVar("T")

POLL_SECONDS = 0.5  # the first pause, see ``polling.py``
# An attempt that takes longer is repeated later, and the next peer in the queue gets its slot.
ATTEMPT_SECONDS = 10.0
# The default is larger than a peer list, so no peer waits for the slot of a stalled bucket.
CONCURRENCY = 64
# The least time that a bucket has to answer a HEAD request.
ANSWER_SECONDS = 2.0

HASH_FIELD = "sha256"  # user metadata of a commit object


@dataclass(frozen=True)
class GatheredUpdate(Generic[T]):
    """One peer's valid object, written within the bounds.

    Attributes:
        fixed: time from which its bytes could not change, in Unix seconds by its store's clock: the commit's time of
            writing, or the object's if no commit is needed.
    """

    uid: int
    update: T
    sha256: str
    size: int
    fixed: float = 0.0


@dataclass(frozen=True)
class GatherResult(Generic[T]):
    """The updates of a window by ascending uid, and a reason for each other peer.

    Attributes:
        published: whether the updates are those of the published included set.
    """

    window: int
    updates: tuple[GatheredUpdate[T], ...]
    skipped: dict[int, Reason]
    published: bool = False

    @property
    def bytes(self) -> int:
        """Total size of the updates."""
        return sum(gathered.size for gathered in self.updates)


class _Refused(Exception):
    """Ends the fetch of one peer with a reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(detail or reason.value)


@dataclass(frozen=True, kw_only=True)
class GatherRules(ABC, Generic[T]):
    """Conditions for a peer's object to count, and how long to wait for it.

    Attributes:
        sha256s: hashes by uid that are known without a commit, for example from an included set.
        bounds: allowed times of writing.
        closes_in: seconds from now during which a missing object is polled; a negative value counts as 0.
        patience: seconds after that during which a bucket that does not answer is retried; 0 if other nodes wait for
            this gather.
        size: of the object in bytes: exactly, or with ``or_less`` at most.
        within: seconds from now after which every transfer of a body is aborted, at any speed.
    """

    window: int
    sha256s: Mapping[int, str] = field(default_factory=dict)
    bounds: UploadBounds
    closes_in: float
    patience: float
    size: int
    or_less: bool = False
    within: float = float("inf")

    @abstractmethod
    def key(self, uid: int) -> str:
        """Return the key of the object of ``uid``."""

    def commit_key(self, uid: int) -> str | None:
        """Return the key of the commit, which holds the hash and is written by ``bounds.start``; None if not needed."""
        return None

    @abstractmethod
    def parse(self, body: bytes, uid: int) -> T:
        """Parse the bytes of ``uid``. Raises PayloadError. Called in a thread."""

    @property
    def transfer(self) -> float:
        """Seconds that the body takes at the lowest allowed speed."""
        return self.size / TransferLimits.download_floor


async def gather(
    stores: Mapping[int, ObjectStore | None], rules: GatherRules[T], *, concurrency: int = CONCURRENCY
) -> GatherResult[T]:
    """Fetch and validate the objects of several uids; returns when each has a result.

    An existing object costs two or three requests. A missing object is polled for ``closes_in`` seconds. A bucket that
    does not answer is retried for ``patience`` seconds more. A HEAD request that has begun by then has at least
    ``ANSWER_SECONDS``. A body has ``transfer`` seconds more, its duration at ``TransferLimits.download_floor``.

    Args:
        stores: by uid; None for a uid without a bucket.
        concurrency: number of peers that are asked at once.
    """
    slots = asyncio.Semaphore(concurrency)
    opened_at = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        tasks = {uid: group.create_task(_judge(uid, stores[uid], rules, slots, opened_at)) for uid in sorted(stores)}
    verdicts = {uid: task.result() for uid, task in tasks.items()}
    return GatherResult(
        window=rules.window,
        updates=tuple(found for found in verdicts.values() if isinstance(found, GatheredUpdate)),
        skipped={uid: reason for uid, reason in verdicts.items() if isinstance(reason, Reason)},
    )


async def _judge(
    uid: int, store: ObjectStore | None, rules: GatherRules[T], slots: asyncio.Semaphore, opened_at: float
) -> GatheredUpdate[T] | Reason:
    """Return one peer's update, or the reason for skipping it."""
    if store is None:
        return Reason.NO_BUCKET
    loop = asyncio.get_running_loop()
    # A past window is already closed, but a bucket with errors is still retried for ``patience``.
    closed_at = opened_at + max(0.0, rules.closes_in)
    while True:
        began = loop.time()
        # The last attempt, which decides, begins when the window closes. A bucket that was silent until then gets none.
        answers_by = max(closed_at + rules.patience, began + ANSWER_SECONDS)
        try:
            async with slots:
                async with asyncio.timeout_at(answers_by), asyncio.timeout(ATTEMPT_SECONDS):
                    info, commit = await _look(uid, store, rules)
                here_by = min(answers_by + rules.transfer, opened_at + rules.within)
                async with asyncio.timeout_at(here_by), asyncio.timeout(ATTEMPT_SECONDS + rules.transfer):
                    body = await store.get(info.key, max_bytes=info.size, if_match=info.etag, verify=False)
            return await asyncio.to_thread(_check_body, uid, body, info, commit, rules)
        except _Refused as refusal:
            # Before the bound the object may still be replaced, and a later attempt would validate the new one.
            if refusal.reason is Reason.TOO_LATE or began >= closed_at:
                logger.info("uid %d: refused: %s", uid, refusal)
                return refusal.reason
            last, wait = closed_at, 0.0
        except (StoreError, TimeoutError) as error:
            reason, patience = _meaning(error, rules.patience)
            last = closed_at + patience
            if began >= last or (reason is Reason.UNAVAILABLE and loop.time() >= last):
                logger.info("uid %d: %s: %s", uid, reason, str(error) or "no answer in time")
                return reason
            wait = getattr(error, "retry_after", None) or 0.0  # given by a bucket that throttles
        pause = wait + pause_after(loop.time() - opened_at, POLL_SECONDS)
        await asyncio.sleep(max(0.0, min(pause, last - loop.time())))


def _meaning(error: Exception, patience: float) -> tuple[Reason, float]:
    """Return the skip reason for an error, and the seconds after the bound for which it is retried."""
    match error:
        case ObjectNotFound():
            return Reason.MISSING, 0.0
        case AccessDenied():
            return Reason.DENIED, 0.0
        case StoreUnavailable() | TimeoutError():
            return Reason.UNAVAILABLE, patience
        case _:  # replaced between two requests, or larger than announced
            return Reason.MALFORMED, 0.0


async def _look(uid: int, store: ObjectStore, rules: GatherRules[T]) -> tuple[ObjectInfo, ObjectInfo | None]:
    """Return the descriptions of the peer's object and of its commit, if one is needed."""
    info = await store.head(rules.key(uid))
    if verdict := rules.bounds.judge(info.last_modified):
        raise _Refused(verdict, f"written at {info.last_modified:.0f}, allowed {rules.bounds}")
    if info.size > rules.size or (info.size < rules.size and not rules.or_less):
        expected = "at most" if rules.or_less else "exactly"
        raise _Refused(Reason.WRONG_SIZE, f"{info.size} bytes, expected {expected} {rules.size}")
    if info.in_parts and rules.bounds != ANYTIME:
        raise _Refused(Reason.MALFORMED, "uploaded in parts: its time may be the start of the upload")
    commit_key = rules.commit_key(uid)
    return info, await _timely_commit(store, commit_key, rules.bounds) if commit_key else None


async def _timely_commit(store: ObjectStore, key: str, bounds: UploadBounds) -> ObjectInfo:
    try:
        commit = await store.head(key)
    except ObjectNotFound:
        raise _Refused(Reason.NO_COMMIT, "no commit object") from None
    if commit.last_modified > bounds.start:
        raise _Refused(Reason.NO_COMMIT, f"committed at {commit.last_modified:.0f}, after {bounds.start:.3f}")
    if commit.in_parts and bounds != ANYTIME:
        raise _Refused(Reason.NO_COMMIT, "committed in parts: its time may be the start of the upload")
    return commit


def _check_body(
    uid: int, body: bytes, info: ObjectInfo, commit: ObjectInfo | None, rules: GatherRules[T]
) -> GatheredUpdate[T]:
    sha256 = hashlib.sha256(body).hexdigest()
    expected = rules.sha256s.get(uid) if commit is None else commit.metadata.get(HASH_FIELD, "")
    # The ETag is checked only if the SHA-256 does not match. It identifies the stored bytes: a body that was damaged in
    # transfer is not the peer's fault and is fetched again.
    if sha256 != expected:
        if body_etag(body, like=info.etag) != info.etag:
            raise StoreUnavailable("the body arrived damaged", key=info.key)
        if expected is not None:
            raise _Refused(Reason.HASH_MISMATCH, f"sha256 {sha256[:12]}…, expected {expected[:12]!r}…")
    try:
        return GatheredUpdate(uid, rules.parse(body, uid), sha256, info.size, (commit or info).last_modified)
    except EmptyUpdate as error:
        raise _Refused(Reason.EMPTY, error.reason) from error
    except PayloadError as error:
        raise _Refused(Reason.MALFORMED, error.reason) from error
