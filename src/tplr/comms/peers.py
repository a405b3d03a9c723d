"""Active peers, peer lists, and the start of the run."""

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Sequence
from functools import partial

from tplr.chain.electors import Electors
from tplr.comms.buckets import NodeBuckets
from tplr.errors import ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.exchange import activity, peers
from tplr.exchange.activity import PeerGroups
from tplr.exchange.agreed import ANSWER_SECONDS, agreed
from tplr.exchange.documents import get_document, put_document
from tplr.exchange.envelope import WHOLE_RUN
from tplr.keys import start_window_key
from tplr.logging import logger
from tplr.pcg64 import PCG64Stream
from tplr.schemas import PeerList, StartWindow


class PeerLists(NodeBuckets):
    """Active peers, and the electors' documents about the run: its start window and its peer lists.

    Attributes:
        peers: uids to gather from, of the list that ``get_peer_list`` returned last.
        peer_groups: active, evaluated and newly inactive uids, as of the last update; also available as
            ``active_peers``, ``eval_peers`` and ``inactive_peers``.
    """

    peers: tuple[int, ...] = ()
    peer_groups = PeerGroups()

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
        """Uids that were in ``eval_peers`` before the last update and are no longer active."""
        return self.peer_groups.newly_inactive

    async def track_active_peers(self, window: int) -> PeerGroups:
        """Update ``peer_groups`` with the uids that uploaded in one of the ``recent_windows`` before ``window``."""
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
        """Sample ``k`` different candidates by weight (``weighted_sample``); unpredictable without ``seed``."""
        return PCG64Stream(secrets.randbits(128) if seed is None else seed).weighted_sample(candidates, weights, k)

    # Peer lists

    async def post_peer_list(self, peer_list: PeerList) -> None:
        """Publish a peer list in this validator's bucket. Raises PreconditionFailed if its window has another one."""
        await peers.post_peer_list(self.own_store, peer_list, self.signer)

    async def get_peer_list(self, window: int | None = None, *, fetch_previous: bool = False) -> PeerList | None:
        """Read the electors' list, or None if there is none yet; arguments as in ``peers.get_peer_list``."""
        answer = await self.agreed(partial(self._list_of, window=window, fetch_previous=fetch_previous))
        found = answer and answer[0]
        if found is not None:
            self.peers = found.peers
        return found

    async def _list_of(self, uid: int, *, window: int | None, fetch_previous: bool) -> tuple[PeerList | None]:
        store = self._store_of(uid)
        return (await peers.get_peer_list(store, self.author(uid), window, fetch_previous=fetch_previous),)

    # The start

    async def post_start_window(self, window: int) -> None:
        """Publish the first window of the run. Raises PreconditionFailed if a different one is published."""
        document, key = StartWindow(start_window=window), start_window_key(self._version)
        await put_document(self.own_store, key, document, window=WHOLE_RUN, signer=self.signer, create_only=True)

    async def get_start_window(self, validator: int | None = None) -> int | None:
        """Read the first window of the run, published by ``validator`` (default: the electors); None if not yet."""
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
        """Copy start window and peer lists of most other electors to this node's bucket, if it lacks them.

        So this node's bucket has them when it becomes an elector. A list that is no longer readable is skipped; the
        others are copied.

        Args:
            horizon: a start window more than this many windows ahead is ignored.

        Raises:
            StoreError, PayloadError: nothing, or only a part, is copied; a later attempt may succeed.
        """
        others = Electors(tuple(one for one in self.electors.ranked if one.uid != self.uid))
        answer = await agreed(others, self._start_of)
        start = answer and answer[0]
        if start is None or start > self.block_to_window(self.metagraph.block) + horizon:
            return
        known = await peers.published_lists(self.own_store, self.signer)
        for first in sorted(await self._listed_by_most(others) - known):
            try:
                found = await agreed(others, partial(self._read_list, first=first))
            except PayloadError as error:
                logger.warning("peer list from window %d on not copied: %s", first, error)
                continue
            if found is not None:
                await self.post_peer_list(found)
        await self.post_start_window(start)

    async def _listed_by_most(self, others: Electors) -> set[int]:
        """Return the first windows of the lists that electors with more than half of the stake publish.

        The electors of different lists may differ, because each elector may lack some lists.

        Raises:
            StoreUnavailable: electors with half of the stake do not answer.
        """
        listed: dict[int, set[int]] = {}  # by uid

        async def ask(uid: int) -> None:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    listed[uid] = await peers.published_lists(self._store_of(uid), self.author(uid))

        await asyncio.gather(*map(ask, others.uids))
        if not others.outweighs(listed):
            raise StoreUnavailable(f"peer lists of uids {sorted({*others.uids} - {*listed})} can't be listed now")
        firsts = sorted(set().union(*listed.values()))
        return {first for first in firsts if others.outweighs([uid for uid in listed if first in listed[uid]])}

    async def _read_list(self, uid: int, *, first: int) -> PeerList:
        return await peers.read_list(self._store_of(uid), first, self.author(uid))
