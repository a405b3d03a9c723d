"""What the highest-stake validator decides for all: where the run starts, and whose updates are gathered."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from tplr.errors import ChainError, PayloadError, PreconditionFailed, StoreError
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.schemas import PeerList
from tplr.scoring.selection import ChosenPeers, first_peers, next_peers

WAIT_BLOCKS = 4


async def start_window(context: NodeContext, decide: Callable[[], Awaitable[int | None]] | None = None) -> int:
    """Wait until the leading validator has published where the run starts; ``decide`` is asked while it has not."""
    comms, clock = context.comms, context.clock
    while True:
        try:
            await comms.refresh()
            start = await comms.get_start_window()
            if start is None and decide:
                start = await decide()
        except (ChainError, StoreError, PayloadError) as error:
            logger.warning("start window not known: %s", error)
            start = None
        if start is not None:
            logger.info("the run starts at window %d, now is window %d", start, clock.window)
            return start
        logger.info("waiting for the leading validator's start window")
        await asyncio.sleep(WAIT_BLOCKS * clock.block_time)


class Leader:
    """Publishes when this node leads; otherwise reads what the leader published."""

    def __init__(self, context: NodeContext, hparams: HParams) -> None:
        self._context = context
        self._comms = context.comms
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._hparams = hparams
        self._period = 0  # the first list holds for the first period

    async def start_window(self) -> int:
        """The first window of the run: as published, or decided here once enough miners have a bucket on chain."""
        return await start_window(self._context, self._decide_start)

    def _candidates(self) -> list[int]:
        """Uids with a bucket on chain and no more stake than a miner has."""
        return [
            neuron.uid
            for neuron in self._comms.metagraph.neurons
            if neuron.uid in self._comms.commitments and neuron.stake <= self._hparams.eval_stake_limit
        ]

    async def _decide_start(self) -> int | None:
        if not self._comms.leads:
            return None
        for other in self._comms.validators():
            # A run that another validator led before goes on.
            if other != self._comms.uid and (start := await self._comms.copy_run(other)) is not None:
                return start
        candidates = self._candidates()
        if len(candidates) < self._hparams.minimum_peers:
            logger.info("%d miners have a bucket on chain, needed: %d", len(candidates), self._hparams.minimum_peers)
            return None
        peers = first_peers(
            candidates,
            {neuron.uid: neuron.incentive for neuron in self._comms.metagraph.neurons},
            active=(await self._comms.track_active_peers(self._clock.window)).active,
            at_most=self._hparams.max_topk_peers,
            reserve=self._hparams.reserve_peers,
        )
        start = self._clock.window + self._hparams.peer_list_window_margin
        # The list first: who sees the start window must find it. If it is there already, this node put it there and
        # was killed, or never heard that it had: what is published holds.
        with contextlib.suppress(PreconditionFailed):
            await self._post(peers, start, initial=True)
        await self._comms.post_start_window(start)
        return start

    async def renew_peers(self, window: int, start_window: int, weights: Mapping[int, float]) -> None:
        """Every ``peer_replacement_frequency`` windows: the active miners by weight, effective some windows ahead.

        A validator that does not lead keeps a copy of what the leader published.
        """
        if not self._comms.leads:
            await self._keep_copy()
            return
        period = (window - start_window) // self._hparams.peer_replacement_frequency
        if period <= self._period:
            return
        active = (await self._comms.track_active_peers(window)).eval
        peers = next_peers(
            active,
            weights,
            at_least=self._hparams.minimum_peers,
            at_most=self._hparams.max_topk_peers,
            reserve=self._hparams.reserve_peers,
            seed=window,
        )
        if peers is None:
            logger.warning("only %d active miners (%s): the peer list stays as it is", len(active), list(active))
            return
        try:
            await self._post(peers, self._clock.window + self._hparams.peer_list_window_margin, initial=False)
        except StoreError as error:
            logger.warning("peer list not published, trying again in the next window: %s", error)
        else:
            self._period = period

    async def _keep_copy(self) -> None:
        leader = self._comms.highest_stake_validator()
        try:
            if leader is not None:
                await self._comms.copy_run(leader)
        except (StoreError, PayloadError) as error:
            logger.warning("what the leading validator published is not copied: %s", error)

    async def _post(self, chosen: ChosenPeers, effective: int, *, initial: bool) -> None:
        document = PeerList(
            peers=chosen.peers,
            reserve_peers=chosen.reserve,
            initial_selection=initial,
            sync_window=self._clock.window,
            first_effective_window=effective,
        )
        await self._comms.post_peer_list(document)
        logger.info("peer list from window %d on: %s, reserve %s", effective, list(chosen.peers), list(chosen.reserve))
        self._telemetry.emit(
            "peers", first_effective_window=effective, peers=list(chosen.peers), reserve=list(chosen.reserve)
        )
