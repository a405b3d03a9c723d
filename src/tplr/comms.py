"""``Comms``: what a neuron holds to speak with the others; each method hands off to one part."""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeVar

from tplr.chain import Chain, ChainManager
from tplr.errors import ObjectNotFound
from tplr.exchange import peers
from tplr.exchange.documents import get_document, put_document
from tplr.exchange.gather import HASH_FIELD, GatherResult, GatherRules, gather
from tplr.hparams import HParams
from tplr.keys import commit_key, debug_key, gradient_key, start_window_key
from tplr.schemas import Bucket, DebugReport, ObjectInfo, PeerList, StartWindow
from tplr.storage import ObjectStore, S3Connections
from tplr.storage.retry import with_retry

T = TypeVar("T")

PUT_DEADLINE_SECONDS = 30.0


class Comms(ChainManager):
    """The chain's phone book and clock (inherited), and the buckets behind it.

    ``async with`` opens the connections; background refresh (``run_refresh``) runs in the node's task group.
    """

    def __init__(self, chain: Chain, hparams: HParams, *, own_bucket: Bucket, endpoint: str | None = None) -> None:
        """``own_bucket`` is this node's gradients bucket with its write key; ``endpoint`` overrides R2's."""
        per_window = hparams.blocks_per_window
        super().__init__(chain, blocks_per_window=per_window, fetch_interval=per_window * chain.block_time)
        self._hparams = hparams
        self._own_bucket = own_bucket
        self._stack = AsyncExitStack()
        self._connections = S3Connections(endpoint)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._connections)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def own_store(self) -> ObjectStore:
        """This node's gradients bucket, writable."""
        return self._connections.store(self._own_bucket)

    def store_of(self, uid: int) -> ObjectStore | None:
        """The bucket that ``uid`` committed on chain, readable; None if it has none."""
        bucket = self.get_bucket(uid)
        return self._connections.store(bucket) if bucket else None

    def leader_store(self) -> ObjectStore | None:
        """Bucket of the highest-stake validator: peer lists and the start window come from there."""
        leader = self.highest_stake_validator()
        return None if leader is None else self.store_of(leader)

    async def put_commit(self, window: int, sha256: str) -> None:
        """Publish the hash of this node's update, before anybody's update is readable."""
        await self._put(commit_key(window, self.uid, self._hparams.version), b"", {HASH_FIELD: sha256})

    async def put_update(self, window: int, body: bytes) -> ObjectInfo:
        """Publish this node's update: one PUT, so that LastModified has one meaning on every server."""
        return await self._put(gradient_key(window, self.uid, self._hparams.version), body, {})

    async def _put(self, key: str, body: bytes, metadata: dict[str, str]) -> ObjectInfo:
        return await with_retry(
            lambda: self.own_store.put(key, body, metadata=metadata), deadline_seconds=PUT_DEADLINE_SECONDS
        )

    async def gather(
        self, uids: Iterable[int], window: int, *, size: int, parse: Callable[[bytes, int], T], ended_ago: float
    ) -> GatherResult[T]:
        """Fetch and judge the updates of ``window``, which ended at least ``ended_ago`` seconds ago."""
        bounds = await self.upload_bounds(window, self._hparams.time_window_delta_seconds)
        rules = GatherRules(
            window=window,
            version=self._hparams.version,
            bounds=bounds,
            closes_in=bounds.end - bounds.start - ended_ago,
            patience=self._hparams.gather_patience_seconds,
            size=size,
            parse=parse,
            require_commit=self._hparams.require_commit,
        )
        return await gather(uids, self.store_of, rules)

    async def active_peers(self, uids: Iterable[int], window: int) -> tuple[int, ...]:
        """Who of ``uids`` uploaded in one of the ``recent_windows`` before ``window``."""
        recent = range(window - 1, window - 1 - self._hparams.recent_windows, -1)
        return await peers.active_peers(uids, self.store_of, recent, self._hparams.version)

    async def post_peer_list(self, peer_list: PeerList) -> None:
        """Publish a peer list in this validator's bucket; PreconditionFailed if that window has one."""
        await peers.post_peer_list(self.own_store, peer_list, self._hparams.version)

    async def get_peer_list(self, window: int) -> PeerList | None:
        """The leading validator's list that holds in ``window``; None if there is none yet."""
        store = self.leader_store()
        return await peers.get_peer_list(store, window, self._hparams.version) if store else None

    async def post_start_window(self, window: int) -> None:
        """Publish the first window of the run; PreconditionFailed if it is published."""
        document = StartWindow(start_window=window)
        await put_document(self.own_store, start_window_key(self._hparams.version), document, create_only=True)

    async def get_start_window(self) -> int | None:
        """The first window of the run as the leading validator says; None if it has not said yet."""
        store = self.leader_store()
        if store is None:
            return None
        try:
            document = await get_document(store, start_window_key(self._hparams.version), StartWindow)
        except ObjectNotFound:
            return None
        return document.start_window

    async def put_report(self, report: DebugReport) -> None:
        """Publish what this node holds after a window."""
        await put_document(self.own_store, debug_key(report.window, self.uid, self._hparams.version), report)
