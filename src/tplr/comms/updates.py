"""Packed updates of a window: publishes this node's commit and update, and gathers updates of all uids."""

import asyncio
from collections.abc import Iterable, Mapping

from tplr.comms.buckets import NodeBuckets
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.errors import ObjectNotFound
from tplr.exchange import updates
from tplr.exchange.gather import GatherResult, gather
from tplr.keys import commit_key
from tplr.schemas import ObjectInfo


class UpdateExchange(NodeBuckets):
    """Packed updates in the buckets of their miners."""

    async def put_commit(self, window: int, sha256: str) -> ObjectInfo:
        """Publish the hash of this node's update of a window; call it before the window ends."""
        return await updates.put_commit(self.own_store, window, self.uid, sha256, self._version)

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
            sha256s: hashes by uid from an included set; those updates may have been written at any time.
            patient: retry buckets that do not answer for ``gather_patience_seconds`` after the time bound. Otherwise
                an update that is not found two seconds after the bound is skipped.
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
        """Describe the commit of an update of ``window``, whose metadata contain the hash.

        It is read from the bucket that ``uid`` had in that window.

        Raises:
            ObjectNotFound: there is no commit, or no bucket.
            ChainUnavailable, StoreError: the commit can't be read now.
        """
        bucket = (await self.buckets_in(window)).get(uid)
        if bucket is None:
            raise ObjectNotFound(f"uid {uid} had no bucket in window {window}")
        return await self._connections.store(bucket).head(commit_key(window, uid, self._version))
