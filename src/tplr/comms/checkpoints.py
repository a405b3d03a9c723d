"""Checkpoints: this node's and the electors'."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from tplr.comms.buckets import NodeBuckets
from tplr.errors import StoreError
from tplr.exchange import checkpoints, retention
from tplr.exchange.checkpoints import Checkpoint
from tplr.exchange.model_checkpoints import (
    LoadedCheckpoint,
    StateHolder,
    read_checkpoint,
    wanted_tensors,
    write_checkpoint,
)
from tplr.exchange.snapshot import SnapshotManifest, TensorLayout
from tplr.keys import version_at
from tplr.logging import logger
from tplr.storage import ObjectStore


class CheckpointExchange(NodeBuckets):
    """Checkpoints of nodes and of programs."""

    @property
    def checkpoints_store(self) -> ObjectStore:
        """The bucket with this node's checkpoints."""
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
        """Publish a program's model and states as this node's checkpoint of ``current_window``; replaces another one.

        The tensors must not change before it returns. It writes temporary files to the folder of local states.

        Args:
            momentum: by parameter.
            local: publish in the node's local folder instead of the bucket.

        Raises:
            StateError: a state contains anything but tensors and plain values, or the disk is full.
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
        """Restore a model, and the given optimizer and scheduler, from a checkpoint of a program or a node.

        Args:
            checkpoint: one of ``checkpoints``; default: ``get_latest_checkpoint(version)``.

        Returns:
            None if there is no checkpoint.

        Raises:
            StateError: it is of another model, optimizer or scheduler, or does not match its manifest.
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

    async def publish_checkpoint(
        self, folder: Path, *, local: bool = False, replace: bool = False, without: Collection[str] = ()
    ) -> SnapshotManifest:
        """Publish the snapshot in ``folder`` as this node's checkpoint, as ``checkpoints.publish``.

        Args:
            local: publish in the node's local folder instead of the bucket.
            replace: replace another checkpoint of that window.
            without: names of values that are not published.
        """
        return await checkpoints.publish(
            self.local_store(self.uid) if local else self.checkpoints_store,
            folder,
            signer=self.signer,
            keep_last=self._hparams.checkpoints_kept,
            replace=replace,
            without=without,
            concurrency=self._resources.checkpoint_parts,
        )

    async def get_latest_checkpoint(self, version: str | None = None) -> Checkpoint | None:
        """Return the first of ``checkpoints``, or None. Raises StoreError if any place can't be listed."""
        return next(iter(await self.checkpoints(version, everywhere=True)), None)

    async def checkpoints(self, version: str | None = None, *, everywhere: bool = False) -> list[Checkpoint]:
        """List checkpoints of ``version`` (default: this run's) in the order in which to try them.

        The electors' checkpoints come first, then those in this node's bucket, then those in its local folder. Among
        the electors', the newest of each elector comes first, then the second newest of each, so that an elector with
        many false ones delays the others only a little.

        Args:
            everywhere: raise StoreError for a place that can't be listed, instead of logging a warning.
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
        own = [one for one in found if one.uid == self.uid]
        turns: Counter[int] = Counter()  # by uid, because one elector's checkpoints may be in two places
        others: list[tuple[int, Checkpoint]] = []
        for one in sorted((one for one in found if one.uid != self.uid), key=lambda one: -one.window):
            others.append((turns[one.uid], one))
            turns[one.uid] += 1
        return [one for _, one in sorted(others, key=lambda turn: turn[0])] + own

    async def leaders_checkpoints(self, version: str | None = None) -> list[Checkpoint]:
        """List the leading validator's published checkpoints, newest first; not verified.

        Those of windows that have not begun are left out, as their author can give them any name. Of another version
        they are listed: its windows may have had another length.

        Raises:
            ChainUnavailable: it is not known which windows have begun.
            StoreError: a bucket can't be listed.
        """
        leader = self.highest_stake_validator()
        if leader is None:
            return []
        found: list[Checkpoint] = []
        for store in self._public_stores(leader):
            found += await checkpoints.published(store, self.author(leader, version))
        if version in (None, self._version):
            now = await self.window_now()
            found = [one for one in found if one.window <= now]
        return sorted(found, key=lambda one: one.window, reverse=True)

    def _public_stores(self, uid: int) -> list[ObjectStore]:
        """Return the buckets that may hold checkpoints of ``uid``."""
        return [store for store in (self._checkpoints, self.store_of(uid)) if store]

    async def fetch_checkpoint(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        wanted: Mapping[str, TensorLayout],
        manifest: SnapshotManifest | None = None,
        mirrors: Sequence[Checkpoint] = (),
    ) -> SnapshotManifest:
        """Download the tensors ``wanted`` of a checkpoint into ``folder``, verified; as ``checkpoints.fetch``."""
        return await checkpoints.fetch(
            checkpoint,
            folder,
            wanted=wanted,
            manifest=manifest,
            mirrors=mirrors,
            concurrency=self._resources.checkpoint_parts,
        )

    async def withdraw_checkpoints(self, after: int) -> None:
        """Delete this node's published checkpoints of windows above ``after``. Raises StoreError."""
        await checkpoints.withdraw(self.checkpoints_store, uid=self.uid, after=after, version=self._version)

    async def cleanup_old_checkpoints(self, keep_last: int = 3) -> None:
        """Delete all but this node's newest ``keep_last`` checkpoints from its bucket. Raises StoreError."""
        await retention.delete_old_checkpoints(
            self.checkpoints_store, uid=self.uid, keep_last=keep_last, version=self._version
        )
