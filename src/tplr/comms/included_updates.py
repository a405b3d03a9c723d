"""The updates of decided sets: aggregates, and single updates that electors republish (witnessed updates)."""

import asyncio
from collections.abc import Collection
from functools import cached_property, partial

from tplr.comms.decisions import Decisions
from tplr.errors import ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.exchange import aggregates, first_answer, updates
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.retention import AGGREGATES
from tplr.exchange.source_speeds import SourceSpeeds
from tplr.keys import gradient_key
from tplr.logging import logger
from tplr.storage.retry import with_retry


class IncludedUpdates(Decisions):
    """The updates of decided sets, for nodes that could not gather them in time."""

    @cached_property
    def _aggregate_speeds(self) -> SourceSpeeds:
        return SourceSpeeds()

    @cached_property
    def _witness_speeds(self) -> SourceSpeeds:
        return SourceSpeeds()

    async def get_aggregate(self, included: IncludedSet) -> list[bytes] | None:
        """Fetch the updates of an included set from an aggregator or a validator, as ``aggregates.find_aggregate``."""
        # All validators are asked, because a former elector still holds its aggregates.
        stores = {"aggregator": self._aggregates} if self._aggregates else {}
        stores |= self.stores_of(self.validators())
        return await aggregates.find_aggregate(stores, included, self._aggregate_speeds)

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

        If one of them does not answer, other validators' aggregates and the electors' buckets are asked, too, and all
        of them again for ``gather_patience_seconds``. No hash is checked.

        Raises:
            ObjectNotFound: the update is deleted.
            StoreUnavailable: a bucket that may hold it does not answer. The text names the window and ``uid``.
            StoreError: the bucket of ``uid`` can't be read.
        """
        seconds = first_answer.ANSWER_SECONDS + self._hparams.gather_patience_seconds
        try:
            return await with_retry(partial(self._find_start, window, uid, size), deadline_seconds=seconds)
        except StoreUnavailable as error:
            problem = f"window {window}: the update of uid {uid} is in no bucket that answers"
            raise StoreUnavailable(f"{problem} ({error}): try again later") from error

    async def _find_start(self, window: int, uid: int, size: int) -> bytes:
        """As ``get_update_start``, in one attempt."""
        aggregated, single = await self._aggregated_at(window, uid), (gradient_key(window, uid, self._version), 0)
        aggregator = None if self._aggregates else self.highest_stake_validator()  # None: the bucket of no uid
        usual = [(aggregator, aggregated), (uid, single)]
        others = [(one, aggregated) for one in self.validators()] + [(one, single) for one in self.electors.uids]
        problem: StoreError = ObjectNotFound(f"uid {uid} has no bucket on chain")
        silent: StoreUnavailable | None = None
        # By owner, not by the bucket's name: anybody can commit the account id of another.
        asked: set[tuple[int | None, str]] = set()
        for places in (usual, others):
            for owner, place in places:
                store = self._aggregates if owner is None else self.store_of(owner)
                if store is None or place is None or (owner, place[0]) in asked:
                    continue
                key, start = place
                asked.add((owner, key))
                try:
                    part = store.get(key, max_bytes=size, byte_range=(start, start + size))
                    return await first_answer.in_time(part, store, size)
                except StoreUnavailable as error:
                    silent = error
                except StoreError as error:
                    problem = error
            if silent is None:  # asking the others for every deleted update would take too long
                raise problem
        raise silent or problem

    async def _aggregated_at(self, window: int, uid: int) -> tuple[str, int] | None:
        """Return key and offset of an update in its window's aggregate; None if the decided set lacks it."""
        try:
            included = await self.get_included(window)
        except PayloadError as error:
            logger.debug("decision of window %d not read: %s", window, error)
            return None
        if included is None or uid not in {one.uid for one in included.included}:
            return None
        return aggregates.place_in_aggregate(included, uid)

    async def put_witnessed(self, window: int, uid: int, body: bytes) -> None:
        """Publish another uid's update of a decided set in this elector's bucket, for nodes that could not get it."""
        seconds = self._hparams.time_window_delta_seconds
        await updates.put_update(self.own_store, window, uid, body, self._version, deadline_seconds=seconds)

    async def witnessed(self, included: IncludedSet, uids: Collection[int]) -> dict[int, bytes]:
        """Fetch the updates of a set that an elector has published for these uids, verified by their hashes."""
        stores, speeds = self.stores_of(self.electors.uids), self._witness_speeds
        wanted = [one for one in included.included if one.uid in uids]
        found = await asyncio.gather(
            *(
                updates.find_by_hash(
                    stores,
                    gradient_key(included.window, one.uid, self._version),
                    speeds,
                    sha256=one.sha256,
                    size=one.size,
                )
                for one in wanted
            )
        )
        return {one.uid: body for one, body in zip(wanted, found, strict=True) if body is not None}

    async def cleanup_aggregates(self, current_window: int) -> None:
        """Delete decisions, aggregates and witnessed updates of windows before the kept checkpoints."""
        await self._cleanup(self.own_store, None, self._kept_from(current_window), AGGREGATES)
