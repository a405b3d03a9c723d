"""``Comms``: a neuron's access to the chain's directory and to everyone's buckets."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

from tplr.chain import Chain, ChainManager
from tplr.chain.connect import open_chain
from tplr.chain.electors import Electors
from tplr.chain.manager import REMEMBERED_WINDOWS
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.config import Access, Environment, Kind
from tplr.errors import ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.exchange import activity, aggregates, checkpoints, peers, retention, scores, updates
from tplr.exchange.activity import PeerGroups
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.agreed import DecisionReader, ElectionResult, agreed
from tplr.exchange.ballot_box import BallotBox
from tplr.exchange.ballots import VOID_WITHIN, BallotReader, Value
from tplr.exchange.checkpoints import Checkpoint
from tplr.exchange.documents import get_document, put_document
from tplr.exchange.envelope import WHOLE_RUN, Author, Run, Signer
from tplr.exchange.first_answer import in_time
from tplr.exchange.gather import GatherResult, gather
from tplr.exchange.model_checkpoints import (
    LoadedCheckpoint,
    StateHolder,
    read_checkpoint,
    wanted_tensors,
    write_checkpoint,
)
from tplr.exchange.quorum import void
from tplr.exchange.snapshot import SnapshotManifest, TensorLayout
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.exchange.state_objects import StateGather, gather_states, get_state, put_state, state_rules, time_bounds
from tplr.exchange.states import State, parse_sparse
from tplr.hparams import HParams
from tplr.keys import (
    StateKind,
    commit_key,
    debug_key,
    evaluation_key,
    gradient_key,
    software_key,
    start_window_key,
    state_key,
    version_at,
)
from tplr.logging import logger
from tplr.pcg64 import PCG64Stream
from tplr.resources import LocalMachine, Resources
from tplr.schemas import (
    Bucket,
    DebugReport,
    EvaluationResult,
    ObjectInfo,
    PeerList,
    ScoreReport,
    ScoreSeal,
    Software,
    StartWindow,
)
from tplr.storage import DirectoryStore, ObjectStore, S3Connections
from tplr.training.model import meta_model

T = TypeVar("T")


class Wallet(Protocol):
    """What of a wallet of the chain's SDK says where its hotkey is."""

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def hotkey_str(self) -> str: ...


class Comms(ChainManager):
    """The chain's directory and clock (inherited), and the buckets that it names.

    Packed updates: ``put_commit``, ``put_update``, ``gather_updates``. Any other state dict, as a safetensors object of
    at most ``max_state_bytes``: ``put``, ``get``, ``gather``. With ``local`` a state is in this machine's ``folder``,
    in a subfolder for each uid, instead of in the uid's bucket.

    The caller owns ``connections``; ``run_refresh`` and ``run_cleanup`` run in the node's task group.

    Attributes:
        own_store: this node's gradients bucket, writable.
        peers: uids to gather from, of the list that ``get_peer_list`` returned last.
        peer_groups: active, evaluated and newly inactive uids, as of the last look; also ``active_peers``,
            ``eval_peers`` and ``inactive_peers``.
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
        """Asks neither the chain nor a bucket.

        Args:
            connections: open connections to the endpoint of all buckets.
            own_bucket: this node's gradients bucket, with its write key.
            aggregator_bucket: is asked first for aggregates; None: only electors' buckets are.
            checkpoints_bucket: holds this node's checkpoints, and is read first for the leading validator's; None: each
                node's checkpoints are in its own bucket.
            folder: of local states and checkpoints; default: ``states/NETUID`` in ``TPLR_CACHE_FOLDER``.
            resources: parts of checkpoints and peers of a gather at once; default: as this machine and the environment
                say.
        """
        per_window = hparams.blocks_per_window
        super().__init__(
            chain,
            blocks_per_window=per_window,
            fetch_interval=per_window * chain.block_time,
            # Where no included sets are published, the leading validator decides alone.
            elector_share=hparams.elector_stake_share if hparams.manifest_timeout_seconds else 1.0,
        )
        self.peer_groups = PeerGroups()
        self.peers: tuple[int, ...] = ()
        self._hparams = hparams
        self._version = hparams.version
        self._run = Run(chain.netuid, hparams.version)
        self.own_store: ObjectStore = connections.store(own_bucket)
        self._aggregates = connections.store(aggregator_bucket) if aggregator_bucket else None
        self._checkpoints = connections.store(checkpoints_bucket) if checkpoints_bucket else None
        self._folder = Environment.read().states_folder(chain.netuid) if folder is None else folder
        self._resources = resources or Resources.choose(LocalMachine.here(), Environment.read().variables)
        self._uploaded = 0
        self._connections = connections
        self._source_speeds = SourceSpeeds()
        self._decisions: dict[int, DecisionReader | Value] = {}

    @classmethod
    @asynccontextmanager
    async def from_env(
        cls,
        hparams: HParams,
        *,
        wallet: Wallet,
        netuid: int = 3,
        network: str = "finney",
        archive: Sequence[str] = (),
    ) -> AsyncIterator[Self]:
        """``Comms`` with the buckets of this process's environment, for the ``async with`` block.

            async with Comms.from_env(hparams, wallet=bt.Wallet("NAME", "HOTKEY")) as comms: ...

        The chain's directory is read once, as with ``refresh``. A program that runs for long also runs ``clock.run()``
        and ``run_refresh()`` in a task group, as nodes do.

        Args:
            wallet: a wallet of the chain's SDK. Only its names and path are read here.
            network, archive: as in ``chain.connect.open_chain``.

        Raises:
            ConfigError: all that is wrong with the environment; or there is no such hotkey.
            ChainError: the chain can't be reached.
        """
        environment = Environment.read()
        buckets = environment.node_buckets()
        machine = LocalMachine.here()
        resources = Resources.choose(machine, environment.variables)
        logger.info("%s", resources.describe(machine))
        opening = open_chain(
            network,
            netuid=netuid,
            wallet_path=wallet.path,
            wallet_name=wallet.name,
            hotkey=wallet.hotkey_str,
            archive=archive,
        )
        async with S3Connections.of(environment) as connections, opening as chain:
            comms = cls(
                chain,
                hparams,
                connections,
                own_bucket=buckets.gradients,
                aggregator_bucket=buckets.aggregator,
                checkpoints_bucket=buckets.checkpoints,
                folder=environment.states_folder(netuid),
                resources=resources,
            )
            await comms.refresh()
            yield comms

    @cached_property
    def max_state_bytes(self) -> int:
        """Limit of a fetched state: 12 bytes for each parameter of the model (itself and an optimizer's two moments in
        float32), and 1 MiB for the header."""
        return 12 * sum(one.numel() for one in meta_model(self._hparams).parameters()) + 2**20

    async def _state_cap(self) -> int:
        """``max_state_bytes``; the first reading imports the model's code, which takes seconds."""
        return await asyncio.to_thread(lambda: self.max_state_bytes)

    # Buckets

    @property
    def own_stores(self) -> list[ObjectStore]:
        """The buckets that this node writes to: its gradients bucket, and the one for checkpoints, if any."""
        return [self.own_store, *([self._checkpoints] if self._checkpoints else [])]

    def store_of(self, uid: int) -> ObjectStore | None:
        """The bucket that ``uid`` committed on chain, read-only; None if there is none."""
        bucket = self.get_bucket(uid)
        return self._connections.store(bucket) if bucket else None

    def author(self, uid: int, version: str | None = None) -> Author:
        """Who signs the documents of ``uid``, as of the last refresh.

        Args:
            version: of the run's rules; default: this run's.

        Raises:
            ObjectNotFound: nobody holds ``uid``, and so it has no bucket.
        """
        hotkey = self.get_hotkey(uid)
        if hotkey is None:
            raise ObjectNotFound(f"uid {uid} is not registered")
        return Author(Run(self._run.netuid, version) if version else self._run, uid, hotkey)

    @property
    def signer(self) -> Signer:
        """Signs this node's documents. Raises NotRegistered if it has no uid."""
        return Signer(self._run, self.uid, self.hotkey, self.chain.sign)

    def leader_store(self) -> ObjectStore | None:
        """The leading validator's bucket, which holds peer lists and the start window; None if nobody leads."""
        leader = self.highest_stake_validator()
        return None if leader is None else self.store_of(leader)

    def local_store(self, uid: int) -> ObjectStore:
        """The subfolder that is the bucket of ``uid`` on this machine."""
        return DirectoryStore(self._folder / str(uid))

    def get_own_bucket(self, bucket_type: Kind, access_type: Access = "read") -> Bucket:
        """A bucket of this process's environment, read at each call. Raises ConfigError, as ``Environment.bucket``."""
        return Environment.read().bucket(bucket_type, access_type)

    # Packed updates

    async def put_commit(self, window: int, sha256: str) -> None:
        """Publish the hash of this node's update of a window, before the window ends."""
        await updates.put_commit(self.own_store, window, self.uid, sha256, self._version)

    async def put_update(self, window: int, body: bytes) -> ObjectInfo:
        """Publish this node's update; gives up after ``time_window_delta_seconds``, when it is too late to count."""
        seconds = self._hparams.time_window_delta_seconds
        return await updates.put_update(self.own_store, window, self.uid, body, self._version, deadline_seconds=seconds)

    async def gather_updates(
        self,
        uids: Iterable[int],
        window: int,
        spec: PayloadSpec,
        *,
        sha256s: Mapping[int, str] | None = None,
        patient: bool = False,
        within: float | None = None,
    ) -> GatherResult[Update]:
        """Fetch the updates of ``window``, and check each against ``spec``.

        Args:
            sha256s: hashes by uid that an included set names; those updates may have been written at any time.
            patient: retry buckets that do not answer for ``gather_patience_seconds`` after the time bound. Without,
                what has not arrived two seconds after the bound is left out.
            within: seconds from now after which no update is waited for.
        """
        began = asyncio.get_running_loop().time()
        bounds = await self.upload_bounds(window, self._hparams.time_window_delta_seconds)
        buckets = await self.buckets_in(window)
        ended_ago = self.clock.seconds_since(window + 1)
        left = float("inf") if within is None else began + within - asyncio.get_running_loop().time()
        rules = updates.UpdateRules.of(
            window, bounds, self._hparams, spec, ended_ago=ended_ago, patient=patient, within=left, sha256s=sha256s
        )
        stores = {uid: self._connections.store(buckets[uid]) if uid in buckets else None for uid in uids}
        return await gather(stores, rules, concurrency=self._resources.gather_peers)

    async def get_commit(self, uid: int, window: int) -> ObjectInfo:
        """The commit of an update of ``window``, in the bucket that ``uid`` had then: its metadata name the hash.

        Raises:
            ObjectNotFound: there is none, or no bucket.
            ChainUnavailable, StoreError: it can't be read now.
        """
        bucket = (await self.buckets_in(window)).get(uid)
        if bucket is None:
            raise ObjectNotFound(f"uid {uid} had no bucket in window {window}")
        return await self._connections.store(bucket).head(commit_key(window, uid, self._version))

    # Included sets and aggregates

    async def get_included(self, window: int) -> IncludedSet | None:
        """The decided set of a window; None if it is not decided (yet), or its electors do not answer.

        A set that a later window's decision voids is empty. What electors decided is read once.

        Raises:
            ChainUnavailable: the window's electors are not known.
            PayloadError: what electors publish instead of decisions leaves no majority.
        """
        nothing = void(window, version_at(self._version, window)).included
        if self.is_voided(window):
            return nothing
        value = await self.get_decision(window)
        if value is None or not value.included.included:
            return value and value.included
        for later in range(window + 1, min(window + 1 + VOID_WITHIN, self.clock.window)):
            try:
                await self.get_decision(later)
            except PayloadError as error:
                logger.info("decision of window %d not read: %s", later, error)
        return nothing if self.is_voided(window) else value.included

    def is_voided(self, window: int) -> bool:
        """Whether a later window's decision that this node has read voids ``window``."""
        later = map(self._decisions.get, range(window + 1, window + 1 + VOID_WITHIN))
        return any(isinstance(known, Value) and window in known.voided for known in later)

    async def get_decision(self, window: int) -> Value | None:
        """What was decided with a window; arguments, None and errors as ``get_included``."""
        known = self._decisions.get(window)
        if known is None:
            known = await self._decision_reader(window)
            self._remember_decision(window, known)
        if isinstance(known, Value):
            return known
        value = await known.look()
        if value is not None:
            self._remember_decision(window, value)
        return value

    async def get_election(self, window: int) -> ElectionResult:
        """What its electors show of the election of a window. Raises ChainUnavailable: they are not known."""
        return await (await self._decision_reader(window)).result()

    async def _decision_reader(self, window: int) -> DecisionReader:
        electors = await self.electors_in(window)
        stores = {uid: store for uid in electors.uids if (store := self.store_of(uid))}
        return DecisionReader(BallotReader(electors, self._run, window), stores, window)

    def _remember_decision(self, window: int, known: DecisionReader | Value) -> None:
        self._decisions[window] = known
        for old in sorted(self._decisions)[:-REMEMBERED_WINDOWS]:
            del self._decisions[old]

    def ballot_box(self, window: int | None, electors: Electors, folder: Path) -> BallotBox:
        """The ballots of an election.

        Args:
            window: None: the election of the run's start.
            folder: for what this node signs in it.
        """
        others = [uid for uid in electors.uids if uid != self.uid]
        return BallotBox(
            subject=window,
            reader=BallotReader(electors, self._run, WHOLE_RUN if window is None else window),
            signer=self.signer,
            own=self.own_store,
            stores={uid: store for uid in others if (store := self.store_of(uid))},
            folder=folder,
            seconds=max(self._hparams.relay_seconds, 2.0),
        )

    async def agreed(self, ask: Callable[[int], Awaitable[T]], *, alike: Callable[[T], Hashable] = repr) -> T | None:
        """What the present electors say alike; as ``exchange.agreed.agreed``. None also if there are no electors."""
        return await agreed(self.electors, ask, alike=alike)

    @property
    def alone(self) -> bool:
        """Whether this node is the only elector, as of the last refresh: what it says counts at once."""
        return self.electors.uids == (self.uid,)

    async def get_aggregate(self, included: IncludedSet) -> list[bytes] | None:
        """The updates of an included set, from an aggregator or a validator; as ``aggregates.find_aggregate``."""
        # A former elector still holds the aggregates of its time.
        stores = [self._aggregates, *map(self.store_of, self.validators())]
        return await aggregates.find_aggregate(filter(None, stores), included, self._source_speeds)

    async def aggregate_of(self, uid: int, included: IncludedSet) -> list[bytes] | None:
        """The updates of an included set, as validator ``uid`` has published them; as ``aggregates.get_aggregate``."""
        return await aggregates.get_aggregate(self._store_of(uid), included)

    async def own_aggregate(self, included: IncludedSet) -> list[bytes] | None:
        """The updates of an included set, as this node has published them; as ``aggregates.get_aggregate``."""
        return await aggregates.get_aggregate(self.own_store, included)

    async def get_update_start(self, window: int, uid: int, size: int) -> bytes:
        """The first ``size`` bytes of an update of a past window, from its aggregate, else from the bucket of ``uid``.

        They are checked against no hash. Raises StoreError, also if a bucket does not answer in time; ObjectNotFound if
        the update is deleted.
        """
        aggregates_store = self._aggregates or self.leader_store()
        unanswered: StoreUnavailable | None = None
        try:
            included = await self.get_included(window)
            if included and aggregates_store and uid in {one.uid for one in included.included}:
                return await in_time(
                    aggregates.get_update_start(aggregates_store, included, uid, size), aggregates_store, size=size
                )
        except (ObjectNotFound, PayloadError) as error:
            logger.debug("aggregate of window %d not read: %s", window, error)
        except StoreUnavailable as error:
            unanswered = error
        key, store = gradient_key(window, uid, self._version), self._store_of(uid)
        try:
            return await in_time(store.get(key, max_bytes=size, byte_range=(0, size)), store, size=size)
        except ObjectNotFound:
            if unanswered:  # it may be there
                raise unanswered from None
            raise

    async def put_witnessed(self, window: int, uid: int, body: bytes) -> None:
        """Publish another uid's update of a decided set in this elector's bucket, for those who could not get it."""
        seconds = self._hparams.time_window_delta_seconds
        await updates.put_update(self.own_store, window, uid, body, self._version, deadline_seconds=seconds)

    async def witnessed(self, included: IncludedSet, uids: Collection[int]) -> dict[int, bytes]:
        """The updates of a set that an elector has published for these uids, checked by their hashes."""
        stores = [store for uid in self.electors.uids if (store := self.store_of(uid))]
        wanted = [one for one in included.included if one.uid in uids]
        found = await asyncio.gather(
            *(
                updates.find_by_hash(
                    stores, gradient_key(included.window, one.uid, self._version), sha256=one.sha256, size=one.size
                )
                for one in wanted
            )
        )
        return {one.uid: body for one, body in zip(wanted, found, strict=True) if body is not None}

    async def put_aggregate(self, included: IncludedSet, body: bytes) -> None:
        """Publish the aggregate of an included set in this node's bucket."""
        await aggregates.put_aggregate(self.own_store, included, body)

    async def cleanup_aggregates(self, current_window: int) -> None:
        """Delete decisions, aggregates, and what this node witnessed of windows before the kept checkpoints."""
        kept = self._hparams.checkpoint_frequency * (self._hparams.checkpoints_kept + 1)
        before = current_window - max(kept, self._hparams.gradient_retention_windows)
        await self._cleanup(self.own_store, None, before, ["aggregator", "gradient"])

    # Checkpoints

    @property
    def checkpoints_store(self) -> ObjectStore:
        """Holds this node's checkpoints."""
        return self._checkpoints or self.own_store

    async def save_checkpoint(
        self,
        model: nn.Module,
        optimizer: StateHolder | None = None,
        scheduler: StateHolder | None = None,
        momentum: Mapping[str, torch.Tensor] | None = None,
        *,
        global_step: int,
        current_window: int,
        start_window: int,
        local: bool = False,
    ) -> SnapshotManifest:
        """Publish a program's model and states as this node's checkpoint of ``current_window``, in place of another.

        The tensors must not change before it returns. Their files are in the folder of local states meanwhile.

        Args:
            momentum: by parameter.
            local: in the node's local folder instead of the bucket.

        Raises:
            StateError: a state is not of tensors and plain values, or the disk is full.
            StoreError: the checkpoint is not published.
        """
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="saving-", dir=self._folder) as folder:
            await asyncio.to_thread(
                write_checkpoint,
                Path(folder),
                model,
                {"optimizer": optimizer, "scheduler": scheduler},
                momentum or {},
                window=current_window,
                start_window=start_window,
                global_step=global_step,
                version=version_at(self._version, current_window),
            )
            return await self.publish_checkpoint(Path(folder), local=local, replace=True)

    async def load_checkpoint(
        self,
        model: nn.Module,
        optimizer: StateHolder | None = None,
        scheduler: StateHolder | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        version: str | None = None,
    ) -> LoadedCheckpoint | None:
        """Restore a model, and the optimizer and scheduler that are given, from a checkpoint of a program or a node.

        Args:
            checkpoint: one of ``checkpoints``; default: ``get_latest_checkpoint(version)``.

        Returns:
            None if there is no checkpoint.

        Raises:
            StateError: it is of another model, optimizer or scheduler, or is not what its manifest says.
            StoreError: it can't be downloaded. Nothing was restored.
        """
        found = checkpoint or await self.get_latest_checkpoint(version)
        if found is None:
            return None
        holders = {"optimizer": optimizer, "scheduler": scheduler}
        whole = await checkpoints.fetch_manifest(found)
        wanted = wanted_tensors(whole, model, holders)
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="loading-", dir=self._folder) as folder:
            manifest = await checkpoints.fetch(
                found, Path(folder), wanted=wanted, manifest=whole, concurrency=self._resources.checkpoint_parts
            )
            momentum = await asyncio.to_thread(read_checkpoint, Path(folder), manifest, model, holders)
        return LoadedCheckpoint(found.uid, manifest.window, manifest.start_window, manifest.global_step, momentum)

    async def publish_checkpoint(self, folder: Path, *, local: bool = False, replace: bool = False) -> SnapshotManifest:
        """Publish the snapshot in ``folder`` as this node's checkpoint; as ``checkpoints.publish``.

        Args:
            local: in the node's local folder instead of the bucket.
            replace: another checkpoint of that window.
        """
        return await checkpoints.publish(
            self.local_store(self.uid) if local else self.checkpoints_store,
            folder,
            signer=self.signer,
            keep_last=self._hparams.checkpoints_kept,
            replace=replace,
            concurrency=self._resources.checkpoint_parts,
        )

    async def get_latest_checkpoint(self, version: str | None = None) -> Checkpoint | None:
        """The first of ``checkpoints``, or None. StoreError if a place can't be listed: the first may be there."""
        return next(iter(await self.checkpoints(version, everywhere=True)), None)

    async def checkpoints(self, version: str | None = None, *, everywhere: bool = False) -> list[Checkpoint]:
        """Checkpoints of ``version`` (default: this run's).

        The electors' come first, newest first, then those in this node's bucket, then those in its local folder.

        Args:
            everywhere: raise StoreError for a place that can't be listed, instead of a warning.
        """
        places = [(uid, store) for uid in self.electors.uids if uid != self.uid for store in self._public_stores(uid)]
        places += [(self.uid, self.checkpoints_store), (self.uid, self.local_store(self.uid))]
        found: list[Checkpoint] = []
        for uid, store in places:
            try:
                found += await checkpoints.published(store, self.author(uid, version))
            except StoreError as error:
                if everywhere:
                    raise
                logger.warning("checkpoints of uid %d not listed: %s", uid, error)
        # One elector's may be in two places.
        return sorted(found, key=lambda one: (1, 0) if one.uid == self.uid else (0, -one.window))

    async def leaders_checkpoints(self, version: str | None = None) -> list[Checkpoint]:
        """The leading validator's published checkpoints, newest first. Raises StoreError."""
        leader = self.highest_stake_validator()
        if leader is None:
            return []
        found: list[Checkpoint] = []
        for store in self._public_stores(leader):
            found += await checkpoints.published(store, self.author(leader, version))
        return sorted(found, key=lambda one: one.window, reverse=True)

    def _public_stores(self, uid: int) -> list[ObjectStore]:
        """The buckets that may hold checkpoints of ``uid``."""
        return [store for store in (self._checkpoints, self.store_of(uid)) if store]

    async def withdraw_checkpoints(self, after: int) -> None:
        """Delete this node's published checkpoints of windows above ``after``. Raises StoreError."""
        await checkpoints.withdraw(self.checkpoints_store, uid=self.uid, after=after, version=self._version)

    async def fetch_checkpoint(
        self, checkpoint: Checkpoint, folder: Path, wanted: Mapping[str, TensorLayout]
    ) -> SnapshotManifest:
        """Download the tensors ``wanted`` of a checkpoint into ``folder``, verified; as ``checkpoints.fetch``."""
        return await checkpoints.fetch(checkpoint, folder, wanted=wanted, concurrency=self._resources.checkpoint_parts)

    # State dicts

    async def put(
        self,
        state_dict: Mapping[str, Any],
        uid: int | None,
        window: int,
        key: StateKind,
        global_step: int = 0,
        *,
        local: bool = True,
        stale_retention: int = 10,
    ) -> float:
        """Publish a state; delete those of ``uid`` and kind that are more than ``stale_retention`` windows older.

        A state of more than 1 GiB is sent in parts. ``gather`` takes it only without time bounds: the time of an object
        in parts may be that of the upload's start.

        Args:
            state_dict: tensors, and plain JSON values.
            uid: the owner; None: this node.

        Returns:
            Time of writing, unix seconds by the store's clock, by which others judge it.

        Raises:
            StoreError, ValueError: the state is not published. A failed deletion is only logged.
        """
        uid = self.uid if uid is None else uid
        store = self.local_store(uid) if local else self.own_store
        name, parts = state_key(key, window, uid, self._version), self._resources.checkpoint_parts
        info = await put_state(store, name, state_dict, global_step, concurrency=parts)
        self._uploaded += info.size
        await self._cleanup(store, uid, window - stale_retention, [key])
        return info.last_modified

    async def get(
        self,
        uid: int,
        window: int,
        key: StateKind,
        *,
        local: bool = True,
        stale_retention: int = 10,
        time_min: datetime | None = None,
        time_max: datetime | None = None,
    ) -> State:
        """The state of ``uid``. Unpacks into ``state_dict, global_step``.

        Args:
            stale_retention: with ``local``, states that are this many windows older are deleted first.
            time_min, time_max: bounds of the time of writing by the store's clock, inclusive; UTC if naive.

        Raises:
            StoreError: ObjectNotFound if there is none within the bounds, or no bucket; ObjectTooLarge above
                ``max_state_bytes``; StoreUnavailable after some attempts.
            PayloadError: the object is not a state.
        """
        store = (await self._stores([uid], window, key, local, stale_retention))[uid]
        if store is None:
            raise ObjectNotFound(f"uid {uid} has committed to no bucket")
        name = state_key(key, window, uid, self._version)
        return await get_state(store, name, max_bytes=await self._state_cap(), bounds=time_bounds(time_min, time_max))

    async def get_with_retry(
        self,
        uid: int,
        window: int,
        key: StateKind,
        timeout: float,
        *,
        local: bool = True,
        stale_retention: int = 10,
        time_min: datetime | None = None,
        time_max: datetime | None = None,
    ) -> State | None:
        """The state of ``uid``, waited for as in ``gather``; None if it does not come, and the log has the reason."""
        stores = await self._stores([uid], window, key, local, stale_retention)
        rules = state_rules(
            key,
            window,
            self._version,
            max_bytes=await self._state_cap(),
            timeout=timeout,
            bounds=time_bounds(time_min, time_max),
        )
        found = await gather(stores, rules)  # of one peer
        return found.updates[0].update if found.updates else None

    async def gather(
        self,
        my_uid: int | None,
        uids: Sequence[int],
        window: int,
        key: StateKind,
        timeout: float,
        *,
        device: torch.device | str,
        totalks: Mapping[str, int] | None,
        local: bool = True,
        stale_retention: int = 10,
        time_min: datetime | None = None,
        time_max: datetime | None = None,
    ) -> StateGather:
        """The states of ``uids``, each judged alone. Each peer's values have unit L2 norm for each parameter.

        Args:
            my_uid: this uid's state is read from this node's own bucket, with its own credential.
            timeout: seconds until every uid has a result, without the time that the largest state takes at the lowest
                allowed speed.
            device: of the tensors.
            totalks: as in ``states.parse_sparse``, with ``topk_compression`` of the run; None accepts any finite
                tensors.
            local, stale_retention, time_min, time_max: as in ``get``.
        """
        rules = state_rules(
            key,
            window,
            self._version,
            max_bytes=await self._state_cap(),
            timeout=timeout,
            bounds=time_bounds(time_min, time_max),
            decode=partial(parse_sparse, totalks=totalks, topk=self._hparams.topk_compression, device=device),
        )
        stores = await self._stores(uids, window, key, local, stale_retention, my_uid=my_uid)
        uploaded, self._uploaded = self._uploaded, 0
        peers_at_once = self._resources.gather_peers
        return await gather_states(stores, rules, upload_bytes=uploaded, concurrency=peers_at_once)

    async def _stores(
        self,
        uids: Iterable[int],
        window: int,
        key: StateKind,
        local: bool,
        stale_retention: int,
        *,
        my_uid: int | None = None,
    ) -> dict[int, ObjectStore | None]:
        """The stores with the states of ``uids``; stale objects in local ones are deleted. Raises as ``state_key``."""
        for uid in uids:
            state_key(key, window, uid, self._version)
        if not local:
            return {uid: self.own_store if uid == my_uid else self.store_of(uid) for uid in uids}
        for uid in uids:
            await self._cleanup(self.local_store(uid), uid, window - stale_retention)
        return {uid: self.local_store(uid) for uid in uids}

    # Old objects

    async def cleanup_local_data(self, uid: int, current_window: int, stale_retention: int) -> None:
        """Delete ``uid``'s local updates, commits and reports from before ``current_window - stale_retention``."""
        await self._cleanup(self.local_store(uid), uid, current_window - stale_retention)

    async def cleanup_s3_data(self, uid: int, current_window: int, stale_retention: int) -> None:
        """As ``cleanup_local_data``, in this node's bucket."""
        await self._cleanup(self.own_store, uid, current_window - stale_retention)

    async def cleanup_old_checkpoints(self, keep_last: int = 3) -> None:
        """Delete all but this node's newest ``keep_last`` checkpoints from its bucket. Raises StoreError."""
        await retention.delete_old_checkpoints(
            self.checkpoints_store, uid=self.uid, keep_last=keep_last, version=self._version
        )

    async def _cleanup(
        self, store: ObjectStore, uid: int | None, before: int, kinds: Iterable[str] = retention.EACH_WINDOW
    ) -> None:
        """Delete stale objects. A failure is only logged: the next window tries again."""
        try:
            await retention.delete_stale(store, uid=uid, before=before, version=self._version, kinds=kinds)
        except StoreError as error:
            logger.warning("stale objects not deleted: %s", error)

    async def run_cleanup(self) -> None:
        """Once a window, for ever, delete objects older than ``gradient_retention_windows``."""
        async for tick in self.clock.ticks():
            await self.cleanup_s3_data(self.uid, tick.window, self._hparams.gradient_retention_windows)

    # Peers

    @property
    def active_peers(self) -> tuple[int, ...]:
        """Uids that uploaded recently."""
        return self.peer_groups.active

    @property
    def eval_peers(self) -> tuple[int, ...]:
        """Active uids with at most a miner's stake, whose updates are evaluated."""
        return self.peer_groups.eval

    @property
    def inactive_peers(self) -> tuple[int, ...]:
        """Uids that were in ``eval_peers`` at the look before and are no longer active."""
        return self.peer_groups.newly_inactive

    async def track_active_peers(self, window: int) -> PeerGroups:
        """Update ``peer_groups`` by who uploaded in one of the ``recent_windows`` before ``window``."""
        recent = range(window - 1, window - 1 - self._hparams.recent_windows, -1)
        found = await activity.active_peers(self.commitments, self.store_of, recent, self._version)
        return self.update_peers_with_buckets(*found)

    def update_peers_with_buckets(self, active: Iterable[int], unknown: Iterable[int] = ()) -> PeerGroups:
        """Update ``peer_groups`` from active and unknown uids, with the stakes as of the last refresh."""
        stakes = {neuron.uid: neuron.stake for neuron in self.metagraph.neurons if neuron.uid in self.commitments}
        self.peer_groups = self.peer_groups.next(active, stakes, self._hparams.eval_stake_limit, unknown=unknown)
        return self.peer_groups

    def weighted_random_sample_no_replacement(
        self, candidates: Sequence[int], weights: Sequence[float], k: int, *, seed: int | None = None
    ) -> list[int]:
        """``k`` different candidates sampled by weight (``weighted_sample``); unpredictable without ``seed``."""
        return PCG64Stream(secrets.randbits(128) if seed is None else seed).weighted_sample(candidates, weights, k)

    async def post_peer_list(self, peer_list: PeerList) -> None:
        """Publish a peer list in this validator's bucket. Raises PreconditionFailed if its window has another one."""
        await peers.post_peer_list(self.own_store, peer_list, self.signer)

    async def get_peer_list(self, window: int | None = None, *, fetch_previous: bool = False) -> PeerList | None:
        """The electors' list, or None if there is none yet; arguments as in ``peers.get_peer_list``."""

        async def ask(uid: int) -> tuple[PeerList | None]:
            store = self._store_of(uid)
            return (await peers.get_peer_list(store, self.author(uid), window, fetch_previous=fetch_previous),)

        answer = await self.agreed(ask)
        found = answer and answer[0]
        if found is not None:
            self.peers = found.peers
        return found

    # The run

    async def post_start_window(self, window: int) -> None:
        """Publish the first window of the run. Raises PreconditionFailed if another one is published."""
        document, key = StartWindow(start_window=window), start_window_key(self._version)
        await put_document(self.own_store, key, document, window=WHOLE_RUN, signer=self.signer, create_only=True)

    async def get_start_window(self, validator: int | None = None) -> int | None:
        """The first window of the run, published by ``validator`` (default: the electors); None if not yet."""
        if validator is None:
            answer = await self.agreed(self._start_of)
            return answer and answer[0]
        return (await self._start_of(validator))[0]

    async def _start_of(self, uid: int) -> tuple[int | None]:
        store, key = self.store_of(uid), start_window_key(self._version)
        if store is None:
            return (None,)
        try:
            document = await get_document(
                store, key, StartWindow, window=WHOLE_RUN, author=self.author(uid), retry=True
            )
        except ObjectNotFound:
            return (None,)
        return (document.start_window,)

    async def copy_run(self, horizon: int) -> None:
        """Copy start window and peer lists of most other electors to this node's bucket, as far as it lacks them.

        So this node's bucket has them when it is an elector.

        Args:
            horizon: a start that lies more windows ahead is none.

        Raises:
            StoreError, PayloadError: not copied.
        """
        others = Electors(tuple(one for one in self.electors.ranked if one.uid != self.uid))
        answer = await agreed(others, self._start_of)
        start = answer and answer[0]
        if start is None or start > self.block_to_window(self.metagraph.block) + horizon:
            return

        async def lists(uid: int) -> frozenset[int]:
            return frozenset(await peers.published_lists(self._store_of(uid), self.author(uid)))

        known = await peers.published_lists(self.own_store, self.signer)
        for first in sorted((await agreed(others, lists, alike=lambda found: found) or set()) - known):

            async def ask(uid: int, first: int = first) -> PeerList:
                return await peers.read_list(self._store_of(uid), first, self.author(uid))

            if (found := await agreed(others, ask)) is not None:
                await self.post_peer_list(found)
        await self.post_start_window(start)

    async def put_software(self, software: Software) -> None:
        """Publish what software this node runs."""
        await put_document(self.own_store, software_key(self.uid), software, window=WHOLE_RUN, signer=self.signer)

    async def get_software(self, uid: int) -> Software:
        """What software ``uid`` runs. Raises as ``get_document``, and ObjectNotFound if it has no bucket."""
        return await get_document(
            self._store_of(uid), software_key(uid), Software, window=WHOLE_RUN, author=self.author(uid)
        )

    async def put_report(self, report: DebugReport) -> None:
        """Publish this node's report of a window."""
        key = debug_key(report.window, self.uid, self._version)
        await put_document(self.own_store, key, report, window=report.window, signer=self.signer)

    async def get_report(self, uid: int, window: int) -> DebugReport:
        """The report of ``uid`` of a window. Raises as ``get_document``, and ObjectNotFound if it has no bucket."""
        key = debug_key(window, uid, self._version)
        return await get_document(self._store_of(uid), key, DebugReport, window=window, author=self.author(uid))

    async def put_scores(self, report: ScoreReport) -> None:
        """Publish this validator's observations and scores of a window."""
        await scores.put_scores(self.own_store, report, self.signer)

    async def put_scores_seal(self, seal: ScoreSeal) -> None:
        """Publish the hash of a score report that is published later. Raises PreconditionFailed for another one."""
        await scores.put_seal(self.own_store, seal, self.signer)

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        """Validator ``uid``'s observations and scores of a window.

        Raises:
            ObjectNotFound: it has no bucket, or has not scored the window; as ScoresSealed, if they are sealed.
            PayloadError, StoreError: as ``exchange.scores.get_scores``.
        """
        return await scores.get_scores(self._store_of(uid), window, self.author(uid), self._hparams)

    async def put_evaluation(self, result: EvaluationResult) -> None:
        """Publish this node's evaluation of the run's model after a window, in place of an earlier one."""
        key, mine = evaluation_key(result.window, self.uid, self._version), result.model_copy(update={"uid": self.uid})
        await put_document(self.own_store, key, mine.sealed(), window=result.window, signer=self.signer)

    async def get_evaluation(self, uid: int, window: int) -> EvaluationResult:
        """The evaluation by ``uid`` of the run's model after a window. Raises as ``get_report``."""
        key = evaluation_key(window, uid, self._version)
        return await get_document(self._store_of(uid), key, EvaluationResult, window=window, author=self.author(uid))

    def _store_of(self, uid: int) -> ObjectStore:
        store = self.store_of(uid)
        if store is None:
            raise ObjectNotFound(f"uid {uid} has committed to no bucket")
        return store
