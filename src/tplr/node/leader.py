"""The leading validator's decisions: the start window and the peer lists."""

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


async def published_start(context: NodeContext, horizon: int, validator: int | None = None) -> int | None:
    """The start window that ``validator`` (default: the leading one) published; None if there is none yet.

    Raises:
        PayloadError: it lies more than ``horizon`` windows ahead, so that no run would begin.
        StoreError: it can't be read.
    """
    start = await context.comms.get_start_window(validator)
    if start is not None and start > context.clock.window + horizon:
        raise PayloadError(f"start window {start} lies more than {horizon} windows ahead of {context.clock.window}")
    return start


async def start_window(
    context: NodeContext, horizon: int, decide: Callable[[], Awaitable[int | None]] | None = None
) -> int:
    """Wait for the published start window; until then ``decide`` may return one."""
    comms, clock = context.comms, context.clock
    while True:
        try:
            await comms.refresh()
            start = await published_start(context, horizon)
            if start is None and decide:
                start = await decide()
        except (ChainError, StoreError, PayloadError) as error:
            logger.warning("start window unknown: %s", error)
            start = None
        if start is not None:
            logger.info("the run's start window is %d, the current window is %d", start, clock.window)
            return start
        logger.info("waiting for the leading validator's start window")
        await asyncio.sleep(WAIT_BLOCKS * clock.block_time)


class Leader:
    """Publishes start window and peer lists while this node leads, else copies the leader's."""

    def __init__(self, context: NodeContext, hparams: HParams) -> None:
        self._context = context
        self._comms = context.comms
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._hparams = hparams
        self._period = 0  # the first list is for the first period

    async def start_window(self) -> int:
        """The run's start window: as published, or chosen here once enough miners have a bucket on chain."""
        return await start_window(self._context, self._hparams.start_horizon_windows, self._decide_start)

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
            # Continue a run that another validator led before.
            if other != self._comms.uid and (start := await self._copy_run(other)) is not None:
                return start
        candidates = self._candidates()
        if len(candidates) < self._hparams.minimum_peers:
            logger.info("%d of %d required miners have a bucket on chain", len(candidates), self._hparams.minimum_peers)
            return None
        peers = first_peers(
            candidates,
            {neuron.uid: neuron.incentive for neuron in self._comms.metagraph.neurons},
            active=(await self._comms.track_active_peers(self._clock.window)).active,
            at_most=self._hparams.max_topk_peers,
            reserve=self._hparams.reserve_peers,
        )
        start = self._clock.window + self._hparams.peer_list_window_margin
        # The list comes first, because a node that reads the start window needs it. If a list exists, an earlier
        # attempt of this node published it, and it stays.
        with contextlib.suppress(PreconditionFailed):
            await self._post(peers, start, initial=True)
        await self._comms.post_start_window(start)
        return start

    async def renew_peers(self, window: int, start_window: int, weights: Mapping[int, float]) -> None:
        """Publish a peer list every ``peer_replacement_frequency`` windows: active miners by weight.

        It takes effect ``peer_list_window_margin`` windows later. A validator that does not lead copies the leader's.
        """
        if not self._comms.leads:
            await self._mirror_leader()
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
            logger.warning("only %d active miners (%s): peer list unchanged", len(active), list(active))
            return
        try:
            await self._post(peers, self._clock.window + self._hparams.peer_list_window_margin, initial=False)
        except StoreError as error:
            logger.warning("peer list not published, retrying in the next window: %s", error)
        else:
            self._period = period

    async def _mirror_leader(self) -> None:
        leader = self._comms.highest_stake_validator()
        if leader is not None:
            await self._copy_run(leader)

    async def _copy_run(self, validator: int) -> int | None:
        """Copy start window and peer lists of ``validator``; None if it has none, or none that can be used."""
        try:
            if await published_start(self._context, self._hparams.start_horizon_windows, validator) is None:
                return None
            return await self._comms.copy_run(validator)
        except (StoreError, PayloadError) as error:
            logger.warning("start window and peer lists of validator %d not copied: %s", validator, error)
            return None

    async def _post(self, chosen: ChosenPeers, effective: int, *, initial: bool) -> None:
        document = PeerList(
            peers=chosen.peers,
            reserve_peers=chosen.reserve,
            initial_selection=initial,
            sync_window=self._clock.window,
            first_effective_window=effective,
        )
        await self._comms.post_peer_list(document)
        logger.info("peer list from window %d: %s, reserve %s", effective, list(chosen.peers), list(chosen.reserve))
        self._telemetry.emit(
            "peers", first_effective_window=effective, peers=list(chosen.peers), reserve=list(chosen.reserve)
        )
