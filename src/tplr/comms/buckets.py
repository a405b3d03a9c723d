"""The buckets committed on chain, this node's own buckets, and the authors of signed documents."""

from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tplr.chain import Chain, ChainManager
from tplr.config import Access, Environment, Kind
from tplr.errors import ObjectNotFound, StoreError
from tplr.exchange import retention
from tplr.exchange.agreed import agreed
from tplr.exchange.envelope import Author, Run, Signer
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.resources import LocalMachine, Resources
from tplr.schemas import Bucket
from tplr.storage import DirectoryStore, ObjectStore, S3Connections

T = TypeVar("T")


class NodeBuckets(ChainManager):
    """The chain's directory and clock (inherited), and the buckets in the directory.

    The caller owns ``connections``; ``run_refresh`` and ``run_cleanup`` run in the node's task group.

    Attributes:
        own_store: this node's gradients bucket, writable.
    """

    def __init__(
        self,
        chain: Chain,
        hparams: HParams,
        connections: S3Connections,
        *,
        own_bucket: Bucket,
        aggregator_bucket: Bucket | None = None,
        checkpoints_bucket: Bucket | None = None,
        folder: Path | None = None,
        resources: Resources | None = None,
    ) -> None:
        """Does no I/O with the chain or a bucket.

        Args:
            connections: open connections to the endpoint of all buckets.
            own_bucket: this node's gradients bucket, with its write key.
            aggregator_bucket: asked first for aggregates; None to ask only validators' buckets.
            checkpoints_bucket: holds this node's checkpoints, and is read first for other nodes' checkpoints; None if
                each node's checkpoints are in its own bucket.
            folder: for local states and checkpoints; default: ``states/NETUID`` in ``TPLR_CACHE_FOLDER``.
            resources: numbers of concurrent checkpoint parts and gathered peers; default: chosen by machine and
                environment.
        """
        per_window = hparams.blocks_per_window
        super().__init__(
            chain,
            blocks_per_window=per_window,
            fetch_interval=per_window * chain.block_time,
            # In a run without included sets, the leading validator decides alone.
            elector_share=hparams.elector_stake_share if hparams.manifest_timeout_seconds else 1.0,
        )
        self._hparams = hparams
        self._version = hparams.version
        self._run = Run(chain.netuid, hparams.version, chain.genesis)
        self.own_store: ObjectStore = connections.store(own_bucket)
        self._aggregates = connections.store(aggregator_bucket) if aggregator_bucket else None
        self._checkpoints = connections.store(checkpoints_bucket) if checkpoints_bucket else None
        self._folder = Environment.read().states_folder(chain.netuid) if folder is None else folder
        self._resources = resources or Resources.choose(LocalMachine.here(), Environment.read().variables)
        self._connections = connections

    @property
    def own_stores(self) -> list[ObjectStore]:
        """The buckets that this node writes to: its gradients bucket, and the checkpoints bucket, if any."""
        return [self.own_store, *([self._checkpoints] if self._checkpoints else [])]

    def store_of(self, uid: int) -> ObjectStore | None:
        """Return the bucket that ``uid`` committed on chain, read-only; None if there is none."""
        bucket = self.get_bucket(uid)
        return self._connections.store(bucket) if bucket else None

    def stores_of(self, uids: Iterable[int]) -> dict[str, ObjectStore]:
        """Return the buckets as ``store_of`` by hotkey, in this order, without those of uids that have none."""
        hotkeys = {neuron.uid: neuron.hotkey for neuron in self.metagraph.neurons}
        return {hotkeys[uid]: store for uid in uids if (store := self.store_of(uid))}

    def _store_of(self, uid: int) -> ObjectStore:
        """As ``store_of``. Raises ObjectNotFound if there is none."""
        store = self.store_of(uid)
        if store is None:
            raise ObjectNotFound(f"uid {uid} has no bucket on chain")
        return store

    def local_store(self, uid: int) -> ObjectStore:
        """Return the subfolder that serves as the bucket of ``uid`` on this machine."""
        return DirectoryStore(self._folder / str(uid))

    def get_own_bucket(self, bucket_type: Kind, access_type: Access = "read") -> Bucket:
        """Read a bucket from this process's environment. Raises ConfigError as ``Environment.bucket``."""
        return Environment.read().bucket(bucket_type, access_type)

    def author(self, uid: int, version: str | None = None) -> Author:
        """Return the author of the documents of ``uid``, as of the last refresh.

        Args:
            version: of the run's rules; default: this run's.

        Raises:
            ObjectNotFound: ``uid`` is not registered, and so has no bucket.
        """
        hotkey = self.get_hotkey(uid)
        if hotkey is None:
            raise ObjectNotFound(f"uid {uid} is not registered")
        return Author(replace(self._run, version=version) if version else self._run, uid, hotkey)

    @property
    def signer(self) -> Signer:
        """The signer of this node's documents. Raises NotRegistered if this node has no uid."""
        return Signer(self._run, self.uid, self.hotkey, self.chain.sign)

    async def agreed(self, ask: Callable[[int], Awaitable[T]], *, key: Callable[[T], Hashable] = repr) -> T | None:
        """Return the answer of the present electors as ``exchange.agreed.agreed``; None also without electors."""
        return await agreed(self.electors, ask, key=key)

    @property
    def alone(self) -> bool:
        """Whether this node is the only elector, as of the last refresh: then it decides alone."""
        return self.electors.uids == (self.uid,)

    # Old objects

    async def cleanup_local_data(self, uid: int, current_window: int, stale_retention: int) -> None:
        """Delete ``uid``'s local updates, commits and reports from before ``current_window - stale_retention``."""
        await self._cleanup(self.local_store(uid), uid, current_window - stale_retention)

    async def cleanup_s3_data(self, uid: int, current_window: int, stale_retention: int) -> None:
        """As ``cleanup_local_data``, in this node's bucket."""
        await self._cleanup(self.own_store, uid, current_window - stale_retention)

    async def run_cleanup(self) -> None:
        """Once a window, delete objects older than ``gradient_retention_windows``; until cancelled.

        Reports are deleted when they are older than the kept checkpoints.
        """
        others = [kind for kind in retention.EACH_WINDOW if kind not in retention.REPORTS]
        async for tick in self.clock.ticks():
            oldest = tick.window - self._hparams.gradient_retention_windows
            await self._cleanup(self.own_store, self.uid, oldest, others)
            await self._cleanup(self.own_store, self.uid, self._kept_from(tick.window), retention.REPORTS)

    def _kept_from(self, current_window: int) -> int:
        """Return the oldest window of which a node may need something that starts from a kept checkpoint."""
        return current_window - retention.windows_of_checkpoints(self._hparams)

    async def _cleanup(
        self, store: ObjectStore, uid: int | None, before: int, kinds: Iterable[str] = retention.EACH_WINDOW
    ) -> None:
        """Delete stale objects. A failure is only logged: the next window tries again."""
        try:
            await retention.delete_stale(store, uid=uid, before=before, version=self._version, kinds=kinds)
        except StoreError as error:
            logger.warning("stale objects not deleted: %s", error)
