"""The updates of decided sets: aggregates, and single updates that electors republish (witnessed updates)."""

import asyncio
from collections.abc import Collection
from functools import cached_property

from tplr.comms.decisions import Decisions
from tplr.errors import ObjectNotFound, PayloadError, StoreUnavailable
from tplr.exchange import aggregates, updates
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.first_answer import in_time
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.keys import gradient_key
from tplr.logging import logger


class IncludedUpdates(Decisions):
    """The updates of decided sets, for nodes that could not gather them in time."""

    @cached_property
    def _source_speeds(self) -> SourceSpeeds:
        return SourceSpeeds()

    async def get_aggregate(self, included: IncludedSet) -> list[bytes] | None:
        """Fetch the updates of an included set from an aggregator or a validator, as ``aggregates.find_aggregate``."""
        # All validators are asked, because a former elector still holds its aggregates.
        stores = [self._aggregates, *map(self.store_of, self.validators())]
        return await aggregates.find_aggregate(filter(None, stores), included, self._source_speeds)

    async def aggregate_of(self, uid: int, included: IncludedSet) -> list[bytes] | None:
        """Fetch the updates of an included set from validator ``uid``, as ``aggregates.get_aggregate``."""
        return await aggregates.get_aggregate(self._store_of(uid), included)

    async def own_aggregate(self, included: IncludedSet) -> list[bytes] | None:
        """Fetch the updates of an included set from this node's bucket, as ``aggregates.get_aggregate``."""
        return await aggregates.get_aggregate(self.own_store, included)

    async def put_aggregate(self, included: IncludedSet, body: bytes) -> None:
        """Publish the aggregate of an included set in this node's bucket."""
        await aggregates.put_aggregate(self.own_store, included, body)

    async def get_update_start(self, window: int, uid: int, size: int) -> bytes:
        """Fetch the first ``size`` bytes of a past window's update from its aggregate, else from the bucket of ``uid``.

        No hash is checked.

        Raises:
            ObjectNotFound: the update is deleted.
            StoreError: a bucket can't be read, or does not answer in time.
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
            if unanswered:  # the update may be in the aggregate
                raise unanswered from None
            raise

    async def put_witnessed(self, window: int, uid: int, body: bytes) -> None:
        """Publish another uid's update of a decided set in this elector's bucket, for nodes that could not get it."""
        seconds = self._hparams.time_window_delta_seconds
        await updates.put_update(self.own_store, window, uid, body, self._version, deadline_seconds=seconds)

    async def witnessed(self, included: IncludedSet, uids: Collection[int]) -> dict[int, bytes]:
        """Fetch the updates of a set that an elector has published for these uids, verified by their hashes."""
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

    async def cleanup_aggregates(self, current_window: int) -> None:
        """Delete decisions, aggregates and witnessed updates of windows before the kept checkpoints."""
        kept = self._hparams.checkpoint_frequency * (self._hparams.checkpoints_kept + 1)
        before = current_window - max(kept, self._hparams.gradient_retention_windows)
        await self._cleanup(self.own_store, None, before, ["aggregator", "gradient"])
