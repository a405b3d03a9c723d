"""Runs one election over buckets: reads the wanted documents and publishes due actions; no slow bucket delays it."""

import asyncio
from collections.abc import Awaitable, Callable

from tplr.errors import StoreError
from tplr.exchange.ballot_box import Ballot, BallotBox, record_ballot
from tplr.exchange.ballots import CheckedProof
from tplr.exchange.election import Commit, Election, Wanted
from tplr.logging import logger

# In Delta. A round waits this long for buckets that have answered before; a request is abandoned after one Delta.
POLL = ROUND = 0.25


class ElectionRun:
    """One election of this node, starting with its vote.

    Attributes:
        requests: number of reads so far.
    """

    def __init__(self, election: Election, box: BallotBox, delta: float, opens: float) -> None:
        """``opens``: time 0 of the election, in loop time; ``delta``: in seconds."""
        self.requests = 0
        self._election = election
        self._box = box
        self._delta = delta
        self._opens = opens
        self._reading: dict[Wanted, asyncio.Task[Ballot | None]] = {}
        self._slow: set[int] = set()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._opens

    async def finish(self, *, until: float, committed: Callable[[CheckedProof], Awaitable[None]]) -> bool:
        """Take part until every node can read the decision; return whether that was before ``until``.

        Args:
            until: in seconds since time 0.
            committed: called once, when this node is committed to a value.

        Raises:
            StateError: this node's ballots can't be stored on its disk.
        """
        told = False
        try:
            while True:
                began = self._now
                await self._read(began)
                await self._publish_due(began)
                if self._election.committed and not told:
                    told = True
                    await committed(self._election.committed)
                if self._election.finished or self._now >= until:
                    return self._election.finished
                now = self._now
                await asyncio.sleep(min(POLL * self._delta, self._election.next_deadline(now) - now))
        finally:
            for task in self._reading.values():
                task.cancel()
            await asyncio.gather(*self._reading.values(), return_exceptions=True)

    async def _read(self, now: float) -> None:
        """Run one round: request the wanted documents; requests to slow buckets continue in later rounds."""
        for wanted in self._election.wanted(now):
            if wanted not in self._reading:
                self.requests += 1
                self._reading[wanted] = asyncio.create_task(self._ask(wanted))
        awaited = [task for wanted, task in self._reading.items() if wanted.uid not in self._slow]
        if awaited:
            await asyncio.wait(awaited, timeout=ROUND * self._delta)
        for wanted, task in [*self._reading.items()]:
            if not task.done():
                self._slow.add(wanted.uid)
                continue
            del self._reading[wanted]
            self._slow.discard(wanted.uid)
            if (ballot := task.result()) is not None:
                record_ballot(self._election, ballot)

    async def _ask(self, wanted: Wanted) -> Ballot | None:
        try:
            async with asyncio.timeout(self._delta):
                return await self._box.read(wanted)
        except TimeoutError:
            logger.info("%s of uid %d not read: no answer in %.2f s", wanted.kind, wanted.uid, self._delta)
            return None

    async def _publish_due(self, seen: float) -> None:
        while actions := self._election.act(seen, self._now):
            for action in actions:
                try:
                    ballot = await self._box.carry_out(action)
                except StoreError as error:
                    logger.warning("%s not published: %s", type(action).__name__, error)
                    if isinstance(action, Commit):
                        self._election.unpublished()
                        return  # the next round commits again
                else:
                    record_ballot(self._election, ballot)
