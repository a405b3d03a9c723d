"""Packed updates in buckets: the hash is written before the window's end, the bytes after it; and rules of a gather."""

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, parse
from tplr.errors import ObjectNotFound, PayloadError, StoreError
from tplr.exchange.first_answer import find_first
from tplr.exchange.gather import HASH_FIELD, GatherRules
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.hparams import HParams
from tplr.keys import commit_key, gradient_key
from tplr.logging import logger
from tplr.schemas import ANYTIME, ObjectInfo, UploadBounds
from tplr.storage import ObjectStore
from tplr.storage.parts import md5_hex
from tplr.storage.retry import with_retry

COMMIT_DEADLINE_SECONDS = 30.0
# The last attempt is this long after the bound, so that no node misses an update that another node finds: a store's
# clock may be this far behind the chain's, and its time stamps are truncated to whole seconds.
STORE_CLOCK_SECONDS = 2.0


async def put_commit(store: ObjectStore, window: int, uid: int, sha256: str, version: str) -> ObjectInfo:
    """Publish the hash of an update; call it before the window ends."""
    commit = _SinglePut(store, commit_key(window, uid, version), b"", {HASH_FIELD: sha256})
    return await with_retry(commit.attempt, deadline_seconds=COMMIT_DEADLINE_SECONDS)


async def put_update(
    store: ObjectStore, window: int, uid: int, body: bytes, version: str, *, deadline_seconds: float
) -> ObjectInfo:
    """Publish an update in one PUT, so that LastModified has the same meaning on every server."""
    update = _SinglePut(store, gradient_key(window, uid, version), body)
    return await with_retry(update.attempt, deadline_seconds=deadline_seconds)


async def find_by_hash(
    stores: Mapping[str, ObjectStore], key: str, speeds: SourceSpeeds, *, sha256: str, size: int
) -> bytes | None:
    """Fetch the object with this hash from one of ``stores``, by owner, that has it at ``key``; None if none has it.

    Does not wait for stores that do not answer: ``first_answer.find_first``.
    """

    async def look(store: ObjectStore) -> ObjectInfo | None:
        with contextlib.suppress(ObjectNotFound):
            info = await store.head(key)
            return info if info.size == size else None
        return None

    async def fetch(store: ObjectStore, info: ObjectInfo) -> bytes:
        body = await store.get(key, max_bytes=size, if_match=info.etag)
        found = (await asyncio.to_thread(hashlib.sha256, body)).hexdigest()
        if found != sha256:
            raise PayloadError(f"{store.name}/{key}: its SHA-256 is {found}, expected {sha256}")
        return body

    try:
        return await find_first(stores, look, fetch, speeds, what=key)
    except (PayloadError, StoreError) as error:
        logger.info("%s not found: %s", key, error)
        return None


@dataclass
class _SinglePut:
    """A PUT that can be retried. If a PUT succeeded but its response was lost, the object keeps its time of writing."""

    store: ObjectStore
    key: str
    body: bytes
    metadata: Mapping[str, str] = field(default_factory=dict)
    tried: bool = False

    async def attempt(self) -> ObjectInfo:
        """Put the object, unless an earlier attempt did."""
        if self.tried:
            with contextlib.suppress(ObjectNotFound):
                there = await self.store.head(self.key)
                if (there.etag, there.metadata) == (await asyncio.to_thread(md5_hex, self.body), self.metadata):
                    return there
        self.tried = True
        return await self.store.put(self.key, self.body, metadata=self.metadata)


@dataclass(frozen=True, kw_only=True)
class UpdateRules(GatherRules[Update]):
    """Rules for the packed updates of a window.

    Attributes:
        require_commit: each update must have the hash that its miner published before the window's end.
    """

    version: str
    spec: PayloadSpec
    require_commit: bool

    def key(self, uid: int) -> str:
        return gradient_key(self.window, uid, self.version)

    def commit_key(self, uid: int) -> str | None:
        return commit_key(self.window, uid, self.version) if self.require_commit else None

    def parse(self, body: bytes, uid: int) -> Update:
        return parse(body, self.spec, window=self.window, uid=uid)

    @classmethod
    def of(
        cls,
        window: int,
        bounds: UploadBounds,
        hparams: HParams,
        spec: PayloadSpec,
        *,
        ended_ago: float,
        patient: bool = False,
        within: float = float("inf"),
        sha256s: Mapping[int, str] | None = None,
    ) -> "UpdateRules":
        """Return the rules of a run for ``window``, which ended at least ``ended_ago`` seconds ago.

        Args:
            patient: retry buckets that do not answer for ``gather_patience_seconds``.
            within: seconds from now after which no update is waited for.
            sha256s: hashes by uid from an included set: those updates may have been written at any time.
        """
        return cls(
            window=window,
            sha256s=sha256s or {},
            bounds=bounds if sha256s is None else ANYTIME,
            closes_in=bounds.end - bounds.start + STORE_CLOCK_SECONDS - ended_ago,
            patience=hparams.gather_patience_seconds if patient else 0.0,
            size=spec.expected_size,
            version=hparams.version,
            spec=spec,
            require_commit=hparams.require_commit and sha256s is None,
            within=within,
        )
