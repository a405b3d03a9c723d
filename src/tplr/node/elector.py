"""An elector: the part of a validator that helps to decide each window's updates and the next peer list."""

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tplr.chain.electors import Electors
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.errors import ChainUnavailable, PayloadError, StateError, StoreError, WindowLost
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.agreed import enough
from tplr.exchange.ballot_box import record_ballot
from tplr.exchange.ballots import VOID_WITHIN, CheckedProof, Vote
from tplr.exchange.election import SLOT, Election
from tplr.exchange.election_run import ElectionRun
from tplr.exchange.gather import ANSWER_SECONDS, GatheredUpdate, GatherResult
from tplr.exchange.quorum import WindowQuestion, tally_updates
from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.hparams import HParams
from tplr.keys import version_at
from tplr.logging import in_window, logger
from tplr.node.failpoints import failpoint
from tplr.node.leader import Leader
from tplr.node.own_aggregates import OwnAggregates, announce
from tplr.node.replica import NodeContext
from tplr.node.windows import WindowUpdates
from tplr.schemas import PeerList
from tplr.storage import TransferLimits

# Number of blocks after which a window's first block is normally final on every node.
FINAL_BLOCKS = 3
# Number of windows after which electors give up an election: every node then keeps the updates that it found.
LAST_WINDOWS = 3


def closes_after(hparams: HParams, size: int, block_time: float) -> float:
    """Return the seconds from a window's end to time 0 of its election, when its updates are accepted or ruled out.

    By then the next window's first block is final, and an update of ``size`` bytes has arrived at the lowest allowed
    speed, for which it has at most half a window. An elector then votes for the updates that it has. One elector that
    does not answer makes all others wait until then.
    """
    bound = hparams.time_window_delta_seconds + STORE_CLOCK_SECONDS
    transfer = min(size / TransferLimits.download_floor, hparams.blocks_per_window * block_time / 2)
    return max(bound, FINAL_BLOCKS * block_time) + ANSWER_SECONDS + transfer


def window_question(
    window: int, listed: PeerList, electors: Electors, hparams: HParams, *, size: int, block_time: float
) -> WindowQuestion:
    """Return the question that the electors of a window decide; ``size``: of an update, in bytes."""
    slot, margin = SLOT * hparams.relay_seconds, hparams.peer_list_window_margin
    window_seconds = hparams.blocks_per_window * block_time
    closes = closes_after(hparams, size, block_time)
    return WindowQuestion(
        window=window,
        version=version_at(hparams.version, window),
        listed=listed,
        size=size,
        at_most=hparams.max_topk_peers,
        effective=window + 1 + margin,
        lists_until=max(1, int((margin * window_seconds - closes) / slot)),
        void_from=max(len(electors.ranked), math.ceil(window_seconds / slot)),
    )


def _in_set(included: IncludedSet, own: GatherResult[Update] | None) -> list[GatheredUpdate[Update]]:
    """Return those of this node's updates that are in the set."""
    wanted = {(one.uid, one.sha256) for one in included.included}
    return [one for one in own.updates if (one.uid, one.sha256) in wanted] if own else []


class Elector:
    """Votes, takes part in each window's election, and publishes the aggregate of the decided set.

    With each new window it also handles one earlier window that it missed. A sole elector decides that window, and
    others do while it is one of the last ``LAST_WINDOWS``. Otherwise this node publishes the peer list that was decided
    with the window, and the updates of the set that are stored here.
    """

    def __init__(
        self, context: NodeContext, hparams: HParams, spec: PayloadSpec, folder: Path, *, leader: Leader
    ) -> None:
        """``folder`` keeps unpublished updates and signed ballots; ``leader`` has the excluded uids and wanted list."""
        self._context = context
        self._comms = context.comms
        self._hparams = hparams
        self._spec = spec
        self._windows = WindowUpdates(context.comms, hparams, spec)
        self._folder = folder
        self._aggregates = OwnAggregates(context.comms, self._windows, folder)
        self._leader = leader
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: set[int] = set()
        self._tried: dict[int, int] = {}  # by window: the network's window at the last attempt
        self._lost: Counter[int] = Counter()  # failed attempts to get the decided updates, by window
        self._window_seconds = hparams.blocks_per_window * context.clock.block_time

    async def run(self, start: int) -> None:
        """Run until cancelled; ``start``: the run's first window."""
        async with asyncio.TaskGroup() as group:
            async for tick in self._context.clock.ticks():
                for window in self._due(start, newest=tick.window - 1):
                    self._running[window] = group.create_task(self._window(window, late=window < tick.window - 1))
                await self._forget_before(tick.window - self._hparams.gradient_retention_windows)
                await self._comms.cleanup_aggregates(tick.window)

    def _due(self, start: int, newest: int) -> list[int]:
        """Return the newest window and one earlier unfinished window: a lost one, else the one tried longest ago.

        The number of attempts is not used: while no window can be decided, each new window would have fewer attempts.
        """
        oldest = max(start, newest - self._hparams.gradient_retention_windows + 1)
        self._done = {window for window in self._done if window >= oldest}
        self._tried = {window: last for window, last in self._tried.items() if window >= oldest}
        self._lost = Counter({window: tries for window, tries in self._lost.items() if window >= newest - VOID_WITHIN})
        self._running = {window: task for window, task in self._running.items() if not task.done()}
        waiting = [
            window
            for window in range(newest, oldest - 1, -1)
            if window not in self._done and window not in self._running
        ]
        if waiting[:1] != [newest]:
            return []
        gaps = sorted(waiting[1:], key=lambda window: (window not in self._lost, self._tried.get(window, -1)))
        return [newest, *gaps[:1]]

    async def _forget_before(self, window: int) -> None:
        """Delete stored updates and ballots of windows before ``window``: no elector votes on them any more."""
        await self._aggregates.drop_before(window)
        for path in await asyncio.to_thread(lambda: [*self._folder.glob("election-*")]):
            number = path.name.removeprefix("election-")
            if number.isdecimal() and int(number) < window:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _window(self, window: int, *, late: bool) -> None:
        """Take part in one election. A failure is retried with the next window."""
        self._tried[window] = self._context.clock.window
        with in_window(window):
            try:
                electors = await self._comms.electors_in(window)
                alone = electors.uids == (self._comms.uid,)
                if self._comms.uid not in electors:
                    done = True
                elif window < self._context.clock.window - LAST_WINDOWS and not alone:
                    done = await self._adopt(window)
                else:
                    done = await self._decide(window, electors, late=late, alone=alone)
            except (ChainUnavailable, PayloadError, StateError, StoreError, WindowLost) as error:
                logger.warning("not decided yet: %s", error)
                self._context.telemetry.emit("problem", text=f"window {window} not decided yet: {error}")
                return
            if done:
                self._finish(window)

    def _finish(self, window: int) -> None:
        self._done.add(window)
        self._tried.pop(window, None)

    async def _adopt(self, window: int) -> bool:
        """Publish the peer list and the stored updates of a window that was decided while this node was away.

        Returns:
            Whether the decision is known. Until then all stored updates are kept: they may be the only copies.
        """
        value = await self._comms.get_decision(window)
        if value is None:
            return False
        await self._leader.decided(value.peers)
        if stored := await self._aggregates.kept(window):
            await self._publish_stored(value.included, stored)
        await self._aggregates.drop(window)
        await asyncio.to_thread(shutil.rmtree, self._ballots(window), ignore_errors=True)
        return True

    async def _publish_stored(self, included: IncludedSet, stored: GatherResult[Update]) -> None:
        """Publish the aggregate of a decided set if all its updates are stored here; else the stored updates."""
        has = _in_set(included, stored)
        if len(has) < len(included.included):
            await self._put_witnessed(included.window, has)
        elif has:
            await self._aggregates.publish(included, stored)

    async def _put_witnessed(self, window: int, updates: Iterable[GatheredUpdate[Update]]) -> None:
        for one in updates:
            await self._comms.put_witnessed(window, one.uid, one.update.body)

    def _ballots(self, window: int) -> Path:
        return self._folder / f"election-{window}"

    async def _decide(self, window: int, electors: Electors, *, late: bool, alone: bool) -> bool:
        """Take part in a window's election; return whether it is decided and this node has done its part.

        Raises:
            ChainUnavailable, PayloadError, StateError, StoreError, WindowLost: this node has not done its part.
        """
        began, clock, loop = time.monotonic(), self._context.clock, asyncio.get_running_loop()
        closes = closes_after(self._hparams, self._spec.expected_size, clock.block_time)
        opens = loop.time() + closes - clock.seconds_since(window + 1)
        electors, delta = electors.rotated(window), self._hparams.relay_seconds
        box = self._comms.ballot_box(window, electors, self._ballots(window))
        question = await self._question(window, electors)
        election = Election(electors, self._comms.uid, question, delta)
        if await box.restore(election):
            own = await self._aggregates.kept(window)
        else:
            own = await self._find(window, late=late, until=None if alone or late else opens - loop.time())
            await failpoint("found")
            await self._aggregates.keep(own)
            await failpoint("kept")
            record_ballot(election, await box.vote(self._vote(own)))
        ahead = self._publish_ahead(own, question, electors)

        async def committed(proof: CheckedProof) -> None:
            await failpoint("included")
            await self._leader.decided(proof.value.peers)
            included = proof.value.included
            logger.info("included set decided: %s; skipped %s", included.describe(), included.skipped)
            announce(self._context.telemetry, included, time.monotonic() - began)

        try:
            # A sole elector decides at once.
            run = ElectionRun(election, box, delta, loop.time() if alone else opens)
            finished = await run.finish(until=LAST_WINDOWS * self._window_seconds, committed=committed)
            for uid in sorted(election.equivocators):
                logger.warning("elector uid %d signed two different ballots", uid)
                self._context.telemetry.emit("problem", text=f"window {window}: elector uid {uid} signed two ballots")
            if not finished or election.decided is None:
                logger.error("not decided within %d windows: other electors do not answer", LAST_WINDOWS)
                return False
            value = election.decided.value
            for voided in value.voided:
                self._finish(voided)
                self._lost.pop(voided, None)
            await self._witness(election, own)
            whole = await self._follow(value.included, own)
            await self._publish(value.included, whole, ahead, self._publishers(value.included, election, electors))
        finally:
            if ahead:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
        await self._aggregates.drop(window)
        await box.clear()
        return True

    async def _question(self, window: int, electors: Electors) -> WindowQuestion:
        listed = await self._comms.get_peer_list(window)
        if listed is None:
            raise PayloadError("no peer list is published for this window")
        size, block_time = self._spec.expected_size, self._context.clock.block_time
        return window_question(window, listed, electors, self._hparams, size=size, block_time=block_time)

    async def _find(self, window: int, *, late: bool, until: float | None) -> GatherResult[Update]:
        """Return the updates that this node finds; for a past window, those that most electors reported, if any."""
        reported = await self._windows.reported(window) if late else None
        found = await self._windows.from_set(reported) if reported else None
        if found is not None:
            return found
        return await self._windows.from_peers(window, excluded=self._leader.excluded, fill_in=False, within=until)

    def _vote(self, own: GatherResult[Update]) -> Vote:
        return Vote(
            found={str(one.uid): one.sha256 for one in own.updates},
            missing={str(uid): reason for uid, reason in sorted(own.skipped.items())},
            peers=self._leader.wish,
            lost=tuple(
                # The second attempt is one window after the first, so that others can publish the updates they have.
                window
                for window in range(own.window - VOID_WITHIN, own.window)
                if self._lost[window] > 1
            ),
        )

    def _alone(self, own: GatherResult[Update], question: WindowQuestion) -> IncludedSet:
        """Return the set that results if all electors found the same updates as this node."""
        electors = self._comms.electors
        return tally_updates(dict.fromkeys(electors.uids, self._vote(own)), electors, question)

    def _publish_ahead(
        self, own: GatherResult[Update] | None, question: WindowQuestion, electors: Electors
    ) -> asyncio.Task[None] | None:
        """Start publishing the aggregate before the decision: usually all electors have found the same updates."""
        if own is None or self._comms.uid not in enough(electors, electors.uids):
            return None
        return asyncio.create_task(self._aggregates.publish(self._alone(own, question), own))

    async def _witness(self, election: Election, own: GatherResult[Update] | None) -> None:
        """Publish the decided updates that an elector did not find: their miners may show them only to some nodes."""
        if own is None or election.decided is None:
            return
        included = {one.uid: one.sha256 for one in election.decided.value.included.included}
        votes = [vote.document for vote in election.votes.values()]
        for one in own.updates:
            disputed = any(vote.found.get(str(one.uid)) != one.sha256 for vote in votes)
            if disputed and included.get(one.uid) == one.sha256:
                await self._comms.put_witnessed(own.window, one.uid, one.update.body)

    async def _follow(self, included: IncludedSet, own: GatherResult[Update] | None) -> GatherResult[Update]:
        """Return all updates of a decided set.

        If some are unavailable, this node publishes those that it has, and its later votes report the window as lost.

        Raises:
            ChainUnavailable, StateError: this node can't do its part now.
            PayloadError, StoreError, WindowLost: some updates are unavailable.
        """
        window, has = included.window, _in_set(included, own)
        try:
            whole = await self._windows.from_set(included, own)
            if whole is None:
                raise PayloadError("its set includes an object that is not an update: no node can apply it")
        except (PayloadError, StoreError, WindowLost):
            self._lost[window] += 1
            await self._put_witnessed(window, has)
            raise
        self._lost.pop(window, None)
        if len(has) < len(included.included):
            await self._aggregates.keep(whole)
        return whole

    async def _publish(
        self,
        included: IncludedSet,
        whole: GatherResult[Update],
        ahead: asyncio.Task[None] | None,
        publishers: Collection[int],
    ) -> None:
        """Publish the aggregate, so that every node can apply the set even if the peers' buckets are emptied."""
        if self._comms.uid not in publishers or not included.included:
            return
        if ahead:
            await asyncio.wait([ahead])
        if not self._aggregates.has_published(included):
            await self._aggregates.publish(included, whole)

    @staticmethod
    def _publishers(included: IncludedSet, election: Election, electors: Electors) -> Sequence[int]:
        """Return the electors that publish a window's aggregate.

        These are the first electors that had all its updates and hold more than half of the stake together: if honest
        electors that answer hold more than half, at least one of these is honest. Fewer electors could all delete the
        aggregate. If the electors that are known to have had all updates hold less than half, all electors publish it.
        """
        wanted = {str(one.uid): one.sha256 for one in included.included}.items()
        voted = election.votes
        had = [uid for uid in electors.uids if uid in voted and wanted <= voted[uid].document.found.items()]
        return enough(electors, had) if electors.outweighs(had) else electors.uids
