"""Chooses the start window and peer lists that an elector votes for, and publishes the decided ones."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tplr.errors import ChainError, PayloadError, PreconditionFailed, StateError, StoreError
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.node.start_election import decide_start
from tplr.schemas import DocumentedScore, PeerList, PeerScore
from tplr.scoring.profiles import ScoreBoard
from tplr.scoring.selection import ChosenPeers, earned_peers, first_peers, next_peers, on_probation

WAIT_BLOCKS = 4


async def published_start(context: NodeContext, horizon: int) -> int | None:
    """Return the start window that most electors published; None if there is none yet.

    Raises:
        PayloadError: it is more than ``horizon`` windows ahead, so that the run would not begin.
        StoreError: it can't be read.
    """
    start = await context.comms.get_start_window()
    if start is not None and start > context.clock.window + horizon:
        raise PayloadError(f"start window {start} is more than {horizon} windows ahead of {context.clock.window}")
    return start


async def start_window(
    context: NodeContext, horizon: int, decide: Callable[[], Awaitable[int | None]] | None = None
) -> int:
    """Wait for the published start window and return it; until then ``decide`` is called and may return one."""
    comms, clock = context.comms, context.clock
    while True:
        try:
            await comms.refresh()
            start = await published_start(context, horizon)
            if start is None and decide:
                start = await decide()
        except (ChainError, StateError, StoreError, PayloadError) as error:
            logger.warning("start window unknown: %s", error)
            start = None
        if start is not None:
            logger.info("the run's start window is %d, the current window is %d", start, clock.window)
            return start
        logger.info("waiting for the electors' start window")
        await asyncio.sleep(WAIT_BLOCKS * clock.block_time)


class Leader:
    """Chooses the start window and peer lists that this node wants, publishes decided ones, and copies other electors'.

    A sole elector publishes the list that it wants.

    With ``probation_windows``, miners earn a place on the list (``earned_peers``), and a new list is proposed whenever
    a place is earned or lost.

    Attributes:
        excluded: uids that the newest scores exclude: this node votes for none of their updates, listed or not.
        wish: the peer list that this node wants; None to keep the present one.
    """

    def __init__(self, context: NodeContext, hparams: HParams, folder: Path) -> None:
        """``folder`` keeps the ballots that this node signs in the election of the start."""
        self.wish: PeerList | None = None
        self._folder = folder
        self.excluded: frozenset[int] = frozenset()
        self._context = context
        self._comms = context.comms
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._hparams = hparams
        self._period = self._wished_period = 0  # the first list is for the first period
        self._published: PeerList | None = None  # the newest list; None if it is not known
        self._decided: dict[int, PeerList] = {}  # not published yet, by first effective window
        # Hotkeys identify the miners, so that the next holder of a uid inherits nothing.
        self._struck: dict[str, int] = {}  # by hotkey: the last scored window in which it broke a rule
        self._places: dict[int, str] = {}  # by uid on the newest list: the hotkey that holds the place
        self._active: dict[int, int] = {}  # by uid: the last window in which it was active

    async def start_window(self) -> int:
        """Return the run's start window: the published one, or decide it once enough miners have a bucket on chain."""
        start = await start_window(self._context, self._hparams.start_horizon_windows, self._decide_start)
        await self._mirror()
        return start

    def _candidates(self) -> list[int]:
        """Return the uids with a bucket on chain and at most a miner's stake."""
        return [
            neuron.uid
            for neuron in self._comms.metagraph.neurons
            if neuron.uid in self._comms.commitments and neuron.stake <= self._hparams.eval_stake_limit
        ]

    async def _decide_start(self) -> int | None:
        if self._comms.uid not in self._comms.electors:
            return None
        candidates = self._candidates()
        if len(candidates) < self._hparams.minimum_peers:
            logger.info("%d of %d required miners have a bucket on chain", len(candidates), self._hparams.minimum_peers)
            return None
        chosen = await self._first_peers(candidates)
        wish = self._list(chosen, self._clock.window + self._hparams.peer_list_window_margin, initial=True)
        peers = await decide_start(self._context, self._hparams, wish, self._folder)
        if peers is None:
            return None
        # The list is published first, because a node that reads the start window needs it. If a list exists, an earlier
        # attempt of this node published it, and it is kept.
        with contextlib.suppress(PreconditionFailed):
            await self._post(peers)
        await self._comms.post_start_window(peers.first_effective_window)
        return peers.first_effective_window

    async def _first_peers(self, candidates: Collection[int]) -> ChosenPeers:
        """Choose the run's first list; with probation, no miner has earned a place yet."""
        if self._hparams.probation_windows:
            window, places = self._clock.window, self._hparams.max_topk_peers
            return ChosenPeers((), (), on_probation(candidates, {}, at_most=places, turn=self._turn(window)))
        return first_peers(
            candidates,
            {neuron.uid: neuron.incentive for neuron in self._comms.metagraph.neurons},
            active=(await self._comms.track_active_peers(self._clock.window)).active,
            at_most=self._hparams.max_topk_peers,
            reserve=self._hparams.reserve_peers,
        )

    def see(self, window: int, board: ScoreBoard, struck: Collection[int]) -> None:
        """Record the results of a scored window.

        Args:
            board: after the window.
            struck: uids that broke a rule in the window.
        """
        if not self._hparams.probation_windows:
            return
        kept = window - self._hparams.probation_windows
        self._struck = {hotkey: last for hotkey, last in self._struck.items() if last > kept}
        self._struck |= {one.hotkey: window for uid, one in board.peer_scores.items() if uid in struck}
        self.excluded = frozenset(uid for uid, proven in self._proven(board).items() if proven is False)

    async def renew_peers(self, window: int, start_window: int, board: ScoreBoard) -> None:
        """Choose a new peer list every ``peer_replacement_frequency`` windows, and when a place is earned or lost.

        The list takes effect ``peer_list_window_margin`` windows later. A sole elector publishes it at once; otherwise
        the elector votes for it. A validator that is not an elector copies the electors' lists.
        """
        if self._comms.uid not in self._comms.electors:
            self.wish, self._published, self._places, self.excluded = None, None, {}, frozenset()
            await self._mirror()
            return
        await self._post_decided()
        period = (window - start_window) // self._hparams.peer_replacement_frequency
        try:
            if self._hparams.probation_windows:
                chosen = await self._earned(window, board, due=period > self._period)
            else:
                chosen = await self._next(window, board) if period > self._period else None
            effective = self._clock.window + self._hparams.peer_list_window_margin
            self.wish = self._list(chosen, effective, initial=False) if chosen else None
            self._wished_period = period
            if self.wish and self._comms.alone:
                await self._post(self.wish)
                self._clear_wish()
        except (StoreError, PayloadError) as error:
            logger.warning("peer list not published, retrying in the next window: %s", error)

    async def decided(self, peers: PeerList | None) -> None:
        """Publish the list that was decided with a window, so that all electors publish the same lists.

        This includes lists that are already in effect or unchanged. ``renew_peers`` retries a failed publication.
        """
        if peers is None:
            return
        if peers.first_effective_window > self._clock.window:
            self._clear_wish()
        self._decided[peers.first_effective_window] = peers
        await self._post_decided()

    async def _post_decided(self) -> None:
        for first, peers in sorted(self._decided.items()):
            try:
                await self._post(peers)
            except PreconditionFailed:
                logger.warning("another peer list from window %d is published", first)
            except StoreError as error:
                logger.warning("decided peer list not published: %s", error)
                continue
            self._decided.pop(first, None)

    def _clear_wish(self) -> None:
        """Clear the wish of this node, because a list was decided."""
        self._period, self.wish = max(self._wished_period, self._period), None

    async def _next(self, window: int, board: ScoreBoard) -> ChosenPeers | None:
        """Choose active miners by weight; None, to keep the list, if there are too few."""
        active = (await self._comms.track_active_peers(window)).eval
        peers = next_peers(
            active,
            board.weights,
            at_least=self._hparams.minimum_peers,
            at_most=self._hparams.max_topk_peers,
            reserve=self._hparams.reserve_peers,
            seed=window,
        )
        if peers is None:
            logger.warning("only %d active miners (%s): peer list unchanged", len(active), list(active))
        return peers

    async def _earned(self, window: int, board: ScoreBoard, *, due: bool) -> ChosenPeers | None:
        """Choose the miners that earned a place; None, to keep the list, if none is due and no place changes."""
        if self._published is None and (found := await self._comms.get_peer_list()):
            self._published = found
            self._places = {uid: self._places.get(uid, hotkey) for uid, hotkey in self._hotkeys(found).items()}
            # An elector that has just started has no record of activity: listed miners count as active now.
            self._active = dict.fromkeys((*found.peers, *found.reserve_peers), window) | self._active
        present = self._published
        listed = (*present.peers, *present.reserve_peers) if present else ()
        active, proven = await self._active_uids(window), self._proven(board)
        waiting = {uid for uid in active if proven.get(uid) and uid not in listed}
        room = len(listed) < self._hparams.max_topk_peers + self._hparams.reserve_peers
        lost = any(proven.get(uid) is False for uid in listed)
        chosen = earned_peers(
            active,
            proven,
            {uid: one.merit for uid, one in board.peer_scores.items() if isinstance(one, PeerScore)},
            listed=listed,
            at_most=self._hparams.max_topk_peers,
            reserve=self._hparams.reserve_peers,
            seed=window,
            turn=self._turn(window),
        )
        newcomers = {*chosen.probation}.difference(listed, present.probation if present else ())
        return chosen if due or lost or newcomers or (waiting and room) else None

    def _turn(self, window: int) -> int:
        """Return the number of the probation turn, which is long enough to measure, judge and list a miner."""
        hparams = self._hparams
        return window // (2 * (hparams.probation_windows + hparams.validator_offset + hparams.peer_list_window_margin))

    async def _active_uids(self, window: int) -> set[int]:
        """Return the uids that are active, or were recently and can't be checked now, perhaps by this node's fault."""
        groups = await self._comms.track_active_peers(window)
        self._active |= dict.fromkeys(groups.eval, window)
        lately = window - self._hparams.recent_windows
        return {*groups.eval, *(uid for uid in groups.unknown if self._active.get(uid, lately) > lately)}

    def _proven(self, board: ScoreBoard) -> dict[int, bool | None]:
        """Return whether each scored miner is known to help (True) or not to help (False); None if not known yet.

        False for a uid whose place belongs to an earlier hotkey, also before its present owner has a score, and for one
        whose stake is above a miner's: nobody measures its updates.
        """
        judged = {uid: self._judged(uid, one, board) for uid, one in board.peer_scores.items()}
        limit = self._hparams.eval_stake_limit
        miners = {one.uid: one.hotkey for one in self._comms.metagraph.neurons if one.stake <= limit}
        return judged | {uid: False for uid, hotkey in self._places.items() if miners.get(uid) != hotkey}

    def _judged(self, uid: int, score: PeerScore | DocumentedScore, board: ScoreBoard) -> bool | None:
        if score.hotkey in self._struck or self._places.get(uid, score.hotkey) != score.hotkey:
            return False
        return board.proven(uid)

    def _hotkeys(self, listed: PeerList) -> dict[int, str]:
        """Return the present hotkeys of the uids on a list."""
        on_list = {*listed.peers, *listed.reserve_peers}
        return {one.uid: one.hotkey for one in self._comms.metagraph.neurons if one.uid in on_list}

    async def _mirror(self) -> None:
        """Copy the other electors' start window and peer lists that this node's bucket lacks."""
        try:
            await self._comms.copy_run(self._hparams.start_horizon_windows)
        except (StoreError, PayloadError) as error:
            logger.warning("start window and peer lists of the electors not copied: %s", error)

    def _list(self, chosen: ChosenPeers, effective: int, *, initial: bool) -> PeerList:
        return PeerList(
            peers=chosen.peers,
            reserve_peers=chosen.reserve,
            probation=chosen.probation if self._hparams.profile == "hardened" else (),
            initial_selection=initial,
            sync_window=self._clock.window,
            first_effective_window=effective,
        )

    async def _post(self, document: PeerList) -> None:
        await self._comms.post_peer_list(document)
        if document.first_effective_window > self._clock.window:
            # Decided lists may be published out of order.
            if not self._published or self._published.first_effective_window < document.first_effective_window:
                self._published, self._places = document, self._hotkeys(document)
        else:
            self._published = None  # this node was offline: the newest list may be another elector's
        logger.info(
            "peer list from window %d: %s, reserve %s, on probation %s",
            document.first_effective_window,
            list(document.peers),
            list(document.reserve_peers),
            list(document.probation),
        )
        self._telemetry.emit(
            "peers",
            first_effective_window=document.first_effective_window,
            peers=list(document.peers),
            reserve=list(document.reserve_peers),
            probation=list(document.probation),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values: recently penalized hotkeys, holders of places on the list, and excluded uids."""
        return {
            "struck": dict(self._struck),
            "places": {str(uid): hotkey for uid, hotkey in self._places.items()},
            "excluded": sorted(self.excluded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises StateError if it is malformed."""
        try:
            struck = {str(hotkey): int(window) for hotkey, window in state["struck"].items()}
            places = {int(uid): str(hotkey) for uid, hotkey in state["places"].items()}
            excluded = frozenset(int(uid) for uid in state["excluded"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"leader: {error!r} in its saved state") from error
        self._struck, self._places, self.excluded = struck, places, excluded
