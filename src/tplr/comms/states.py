"""State dicts of programs, as safetensors objects."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any

import torch

from tplr.comms.buckets import NodeBuckets
from tplr.errors import ObjectNotFound
from tplr.exchange.gather import gather
from tplr.exchange.state_objects import StateGather, gather_states, get_state, put_state, state_rules, time_bounds
from tplr.exchange.states import State, parse_sparse
from tplr.keys import StateKind, state_key
from tplr.storage import ObjectStore
from tplr.training.model import meta_model


class StateExchange(NodeBuckets):
    """State dicts other than packed updates, as safetensors objects of at most ``max_state_bytes``.

    With ``local`` a state is in this machine's ``folder``, in a subfolder for each uid, instead of in the uid's bucket.
    """

    _uploaded = 0  # bytes of states since the last gather

    @cached_property
    def max_state_bytes(self) -> int:
        """Maximum size of a fetched state in bytes.

        12 bytes for each parameter of the model (the parameter and two optimizer moments in float32), and 1 MiB for the
        header.
        """
        return 12 * sum(one.numel() for one in meta_model(self._hparams).parameters()) + 2**20

    async def _state_cap(self) -> int:
        """Return ``max_state_bytes``; the first access imports the model's code, which takes seconds."""
        return await asyncio.to_thread(lambda: self.max_state_bytes)

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

        A state of more than 1 GiB is uploaded in parts. ``gather`` accepts it only without time bounds, because its
        time may be that of the upload's start.

        Args:
            state_dict: tensors, and up to ``states.MAX_VALUES`` plain JSON values with up to ``MAX_CONTAINERS`` lists
                and objects.
            uid: the owner; None for this node.

        Returns:
            The time of writing, in Unix seconds by the store's clock, that readers compare with their bounds.

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
        """Read the state of ``uid``. The result unpacks into ``state_dict, global_step``.

        Args:
            stale_retention: with ``local``, states that are this many windows older are deleted first.
            time_min, time_max: bounds of the time of writing by the store's clock, inclusive; UTC if naive.

        Raises:
            StoreError: ObjectNotFound if there is no bucket or no state within the bounds; ObjectTooLarge above
                ``max_state_bytes``; StoreUnavailable after some attempts.
            PayloadError: the object is not a state.
        """
        store = (await self._stores([uid], window, key, local, stale_retention))[uid]
        if store is None:
            raise ObjectNotFound(f"uid {uid} has no bucket on chain")
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
        """Wait for the state of ``uid`` as ``gather``; None if there is none in time, and the reason is logged."""
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
        """Gather the states of ``uids``, each validated independently; values are scaled to unit L2 norm per parameter.

        Args:
            my_uid: this uid's state is read from this node's own bucket, with its own credential.
            timeout: seconds until every uid has a result; the transfer time of the largest state at the lowest allowed
                speed is added.
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
        """Return the stores with the states of ``uids``; delete stale local objects. Raises as ``state_key``."""
        for uid in uids:
            state_key(key, window, uid, self._version)
        if not local:
            return {uid: self.own_store if uid == my_uid else self.store_of(uid) for uid in uids}
        for uid in uids:
            await self._cleanup(self.local_store(uid), uid, window - stale_retention)
        return {uid: self.local_store(uid) for uid in uids}
