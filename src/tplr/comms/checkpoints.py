"""Checkpoints: this node's and the electors'."""

import asyncio
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from tplr.comms.buckets import NodeBuckets
from tplr.errors import ObjectNotFound, StateError, StoreError, StoreUnavailable
from tplr.exchange import checkpoints, retention
from tplr.exchange.checkpoints import Checkpoint, Copies, UsedPart, alike, part_of
from tplr.exchange.model_checkpoints import (
    LoadedCheckpoint,
    StateHolder,
    read_checkpoint,
    wanted_tensors,
    write_checkpoint,
)
from tplr.exchange.snapshot import MAX_MANIFEST_BYTES, SnapshotManifest, TensorLayout
from tplr.keys import version_at
from tplr.logging import logger
from tplr.storage import ObjectStore

SHOWN_WINDOWS = 3  # of each elector, in an error


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
            checkpoint: one of ``checkpoints``, whose author is trusted; default: the newest one that electors with more
                than half of the stake publish with the same model and the same of these states; if they publish none,
                this node's own newest one.

        Returns:
            None if there is no checkpoint.

        Raises:
            StateError: it is of another model, optimizer or scheduler, or does not match its manifest; or as
                ``agreed_checkpoint``.
            StoreError: the checkpoints can't be listed, or it can't be downloaded. Nothing was restored.
        """
        holders = {name: one for name, one in (("optimizer", optimizer), ("scheduler", scheduler)) if one is not None}

        def used(manifest: SnapshotManifest) -> SnapshotManifest:
            return part_of(manifest, wanted_tensors(manifest, model, holders), values=holders)

        found = Copies([checkpoint]) if checkpoint else await self._latest(used, version)
        if found is None:
            return None
        first, *mirrors = found.checkpoints
        part = found.manifest or await asyncio.to_thread(used, await checkpoints.fetch_manifest(first))
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="loading-", dir=self._folder) as folder:
            manifest = await self.fetch_checkpoint(first, Path(folder), part.tensors, part, mirrors)
            momentum = await asyncio.to_thread(read_checkpoint, Path(folder), manifest, model, holders)
        return LoadedCheckpoint(first.uid, manifest.window, manifest.start_window, manifest.global_step, momentum)

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
        """Return the newest checkpoint that electors with more than half of the stake publish with the same model.

        If they publish none: the newest one in this node's bucket, else in its local folder, or None.

        Raises:
            StateError, StoreUnavailable: as ``agreed_checkpoint``.
            StoreError: this node's own checkpoints can't be listed.
        """
        found = await self._latest(_model_part, version)
        return found and found.checkpoints[0]

    async def agreed_checkpoint(
        self,
        used: UsedPart,
        version: str | None = None,
        *,
        before: float = math.inf,
        max_bytes: int = MAX_MANIFEST_BYTES,
    ) -> Copies:
        """Find the newest checkpoint of which electors with more than half of the stake publish the same part.

        So no elector with less can choose it, or prevent the choice: one whose bucket can't be listed, or whose
        manifest is not valid, has no vote. Windows are not compared with the chain's, because another version's windows
        may have another length, and a program's windows are its own numbers.

        Args:
            used: the part that the caller uses; all else may differ.
            version: of the checkpoints; default: this run's.
            before: only checkpoints that were complete before this time, by the store's clock, are considered.
            max_bytes: of a manifest.

        Returns:
            Its copies; that of the elector with the most stake is the first.

        Raises:
            ObjectNotFound: electors with more than half of the stake publish no checkpoint of any one window.
            StoreUnavailable: there is none, and an elector that could not be read may have one.
            StateError: there is none, because they publish different ones.
        """
        electors, problems = self.electors, dict[int, StoreError]()

        async def ask(uid: int) -> list[Checkpoint]:
            found: list[Checkpoint] = []
            for store in self._public_stores(uid):
                try:
                    found += await checkpoints.published(store, self.author(uid, version), before=before)
                except StoreError as error:
                    problems[uid] = error
            return found

        listed = dict(zip(electors.uids, await asyncio.gather(*map(ask, electors.uids)), strict=True))
        windows: dict[int, list[Checkpoint]] = defaultdict(list)
        for found in listed.values():
            for one in found:
                windows[one.window].append(one)
        for window in sorted(windows, reverse=True):
            if electors.outweighs(one.uid for one in windows[window]):
                most, *_ = await alike(windows[window], used, electors, max_bytes=max_bytes)
                if electors.outweighs(one.uid for one in most.checkpoints):
                    return most
        text = _not_agreed(version or self._version, listed, problems, before)
        if not any(electors.outweighs([*problems, *(one.uid for one in here)]) for here in ([], *windows.values())):
            raise ObjectNotFound(text)
        raise StoreUnavailable(text) if problems else StateError(text)

    async def _latest(self, used: UsedPart, version: str | None) -> Copies | None:
        """Return the checkpoint of ``agreed_checkpoint``, else this node's own newest one, or None."""
        try:
            return await self.agreed_checkpoint(used, version)
        except ObjectNotFound as error:
            logger.info("%s", error)
        for store in (self.checkpoints_store, self.local_store(self.uid)):
            if own := await checkpoints.published(store, self.author(self.uid, version)):
                return Copies(own[:1])
        return None

    async def checkpoints(self, version: str | None = None) -> list[Checkpoint]:
        """List checkpoints of ``version`` (default: this run's) in the order in which to try them.

        The electors' checkpoints come first, then those in this node's bucket, then those in its local folder. Among
        the electors', the newest of each elector comes first, then the second newest of each, so that an elector with
        many false ones delays the others only a little. A place that can't be listed is skipped with a warning.
        """
        places = [(uid, store) for uid in self.electors.uids if uid != self.uid for store in self._public_stores(uid)]
        places += [(self.uid, self.checkpoints_store), (self.uid, self.local_store(self.uid))]
        found: list[Checkpoint] = []
        for uid, store in places:
            try:
                found += await checkpoints.published(store, self.author(uid, version))
            except StoreError as error:
                logger.warning("checkpoints of uid %d not listed: %s", uid, error)
        own = [one for one in found if one.uid == self.uid]
        turns: Counter[int] = Counter()  # by uid, because one elector's checkpoints may be in two places
        others: list[tuple[int, Checkpoint]] = []
        for one in sorted((one for one in found if one.uid != self.uid), key=lambda one: -one.window):
            others.append((turns[one.uid], one))
            turns[one.uid] += 1
        return [one for _, one in sorted(others, key=lambda turn: turn[0])] + own

    async def leaders_checkpoints(self) -> list[Checkpoint]:
        """List the leading validator's published checkpoints, newest first; not verified.

        Those of windows that have not begun are left out, as their author can give them any name.

        Raises:
            ChainUnavailable: it is not known which windows have begun.
            StoreError: a bucket can't be listed.
        """
        leader = self.highest_stake_validator()
        if leader is None:
            return []
        found: list[Checkpoint] = []
        for store in self._public_stores(leader):
            found += await checkpoints.published(store, self.author(leader))
        now = await self.window_now()
        return sorted((one for one in found if one.window <= now), key=lambda one: one.window, reverse=True)

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


def _model_part(manifest: SnapshotManifest) -> SnapshotManifest:
    """Return the manifest of the model alone. Raises StateError as ``part_of``."""
    return part_of(manifest, {name: one for name, one in manifest.tensors.items() if name.startswith("model.")})


def _not_agreed(
    version: str, listed: Mapping[int, Sequence[Checkpoint]], problems: Mapping[int, StoreError], before: float
) -> str:
    """Describe what was found instead of a checkpoint on which most electors agree."""

    def found(uid: int) -> str:
        newest = sorted({one.window for one in listed[uid]}, reverse=True)[:SHOWN_WINDOWS]
        return f"uid {uid}: " + (str(problems[uid]) if uid in problems else f"windows {newest}" if newest else "none")

    when = "" if before == math.inf else f" from before {datetime.fromtimestamp(before, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"version {version}: no checkpoint{when} is published alike by electors with more than half of the stake "
        f"({'; '.join(map(found, listed)) or 'there are no electors'}): try again; if that does not help, let most "
        "electors publish the same one"
    )
