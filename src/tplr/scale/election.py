"""Simulates one window's election: runs the nodes' own state machines in simulated time.

Each request takes the requesting elector's request time; signatures are left out. A reading round in which nothing can
have changed is counted but not run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tplr.chain.electors import Electors
from tplr.exchange.ballot_box import record_ballot
from tplr.exchange.ballots import (
    CheckedDecision,
    CheckedRelay,
    CheckedStatus,
    Commitment,
    Echo,
    Proposal,
    Value,
    Vote,
    value_id,
)
from tplr.exchange.election import Action, Commit, Election, Propose, Repeat, SendStatus, Wanted
from tplr.exchange.election_run import POLL
from tplr.exchange.envelope import Author, Run, Signed, body_sha256
from tplr.exchange.quorum import Question
from tplr.schemas import Document

RUN = Run(0, "simulated")
SHORTEST = 1e-3  # seconds, so that no two rounds of an elector are at the same time


@dataclass
class Outcome:
    """The result of an election; times are seconds since the election's time 0.

    Attributes:
        decided: the decided value, or None.
        committed: time from which each elector's commitment can be read, by uid.
        requests, written: number of each elector's reads and writes, by uid.
    """

    decided: Value | None = None
    committed: dict[int, float] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)

    def known(self, electors: Electors) -> float:
        """Return the time from which commitments of more than half of the stake can be read; infinite: never."""
        who: list[int] = []
        for uid, at in sorted(self.committed.items(), key=lambda one: (one[1], one[0])):
            who.append(uid)
            if electors.outweighs(who):
                return at
        return math.inf


class _Elector:
    """One elector's state machine and the times of its rounds."""

    def __init__(self, machine: Election, request: float, delta: float) -> None:
        self.machine = machine
        self.request = request
        self.pause = POLL * delta
        self.last = 0.0  # end of the last round
        self.planned = math.inf  # end of the next round that can change something; ``begins`` is its start
        self.begins = 0.0
        self.looking = 0  # documents that each round requests while nothing changes
        self.begun = False


class SimulatedElection:
    """One window's election; ``run`` takes the votes and returns the outcome. Use one object for each window."""

    def __init__(
        self,
        electors: Electors,
        question: Question,
        *,
        window: int,
        delta: float,
        request: Mapping[int, float],
        wait: Callable[[float], float] = lambda at: 0.0,
    ) -> None:
        """Create an election without votes.

        Args:
            request: seconds that a request of each elector takes, by uid; electors without an entry are silent.
            wait: returns the extra seconds of a request that begins at the given time (seconds since time 0).
        """
        self._window = window
        self._delta = delta
        self._wait = wait
        self._electors = electors
        self._nodes = {
            uid: _Elector(Election(electors, uid, question, delta), request[uid], delta)
            for uid in electors.uids
            if uid in request
        }
        self._published: dict[Wanted, tuple[float, Any]] = {}
        self._queue: list[tuple[float, int, int]] = []
        self._pushed = 0
        self._outcome = Outcome(requests=dict.fromkeys(self._nodes, 0), written=dict.fromkeys(self._nodes, 0))

    def run(self, votes: Mapping[int, tuple[float, Vote]], *, until: float) -> Outcome:
        """Run the election until all electors have finished or the time ``until``, and return the outcome.

        Args:
            votes: by uid, the time of the vote in seconds since time 0, and the vote.
        """
        for uid in sorted(votes.keys() & self._nodes.keys()):
            self._plan(uid, votes[uid][0], votes[uid][0])
        while self._queue:
            at, _, uid = heapq.heappop(self._queue)
            node = self._nodes[uid]
            if at > until:
                break
            if at != node.planned or node.machine.finished:
                continue
            if not node.begun:
                self._vote(uid, votes[uid][1], at)
            else:
                self._round(uid, at)
        done = [node.machine.decided for node in self._nodes.values() if node.machine.decided]
        self._outcome.decided = done[0].value if done else None
        return self._outcome

    def _plan(self, uid: int, begin: float, at: float) -> None:
        """Plan a round from ``begin`` to ``at``, unless an earlier-ending round is planned already."""
        node = self._nodes[uid]
        if at < node.planned:
            node.begins, node.planned = begin, at
            heapq.heappush(self._queue, (at, self._pushed, uid))
            self._pushed += 1

    def _vote(self, uid: int, vote: Vote, now: float) -> None:
        node = self._nodes[uid]
        node.begun, node.last = True, now
        own = self._signed(vote, uid)
        node.machine.vote(own)
        self._publish(Wanted("vote", uid, 0), own, uid, now)
        # The first round begins when the vote has been written.
        node.planned = math.inf
        self._plan(uid, node.last, self._answered(node, node.last))

    def _round(self, uid: int, now: float) -> None:
        """Run one reading round that ends ``now``, and take the actions that follow from it."""
        node = self._nodes[uid]
        node.planned = math.inf
        began = max(node.last, node.begins)
        idle = max(0, int((began - node.last) / (node.pause + node.request)))
        self._outcome.requests[uid] += idle * node.looking
        wanted = node.machine.wanted(began)
        self._outcome.requests[uid] += len(wanted)
        found_by = began + self._wait(began)  # a request waits first; the store looks up the object after that
        for one in wanted:
            since, ballot = self._published.get(self._place(one), (math.inf, None))
            if since <= found_by:
                record_ballot(node.machine, ballot)
        while actions := node.machine.act(began, now):
            for action in actions:
                self._say(uid, action, now)
        node.last = max(node.last, now)  # the pause begins when everything has been written
        if node.machine.finished:
            return
        left = node.machine.wanted(now)
        node.looking = len(left)
        # A document that exists or is being written is read in the first round after it becomes readable.
        times = [self._published[self._place(one)][0] for one in left if self._place(one) in self._published]
        self._plan(uid, *self._tick(node, min([*times, node.machine.next_deadline(now) + SHORTEST])))

    def _tick(self, node: _Elector, at: float) -> tuple[float, float]:
        """Return begin and end of the first round that begins at ``at`` or later, and after the last round."""
        at = max(at, node.last)
        rounds = max(0, math.ceil((at - node.last - node.pause) / (node.pause + node.request)))
        begin = node.last + node.pause + rounds * (node.pause + node.request)
        # The pause before a round ends early at a deadline, so no deadline is missed by a whole pause.
        begin = min(max(begin, at), at + node.pause)
        return begin, self._answered(node, begin)

    def _answered(self, node: _Elector, at: float) -> float:
        """Return the time at which a request that begins ``at`` is answered."""
        return at + node.request + self._wait(at)

    def _publish(self, key: Wanted, ballot: Any, uid: int, now: float) -> float:
        """Write a ballot, and return the time from which others can read it."""
        node = self._nodes[uid]
        self._outcome.written[uid] += 1
        at = node.last = self._answered(node, now)
        self._published[key] = (at, ballot)
        for other, reader in self._nodes.items():
            if other != uid and reader.begun and not reader.machine.finished:
                self._plan(other, *self._tick(reader, at))
        return at

    def _place(self, wanted: Wanted) -> Wanted:
        return wanted if wanted.kind != "decision" else Wanted("decision", wanted.uid, 0)

    def _say(self, uid: int, action: Action, now: float) -> None:
        machine = self._nodes[uid].machine
        match action:
            case SendStatus(slot, votes, proof):
                status = CheckedStatus(uid, slot, votes, proof)
                machine.status(status)
                self._publish(Wanted("status", uid, slot), status, uid, now)
            case Propose(slot, value, votes, proof):
                named = {str(voter): one.sha256 for voter, one in votes.items()}
                proposal = self._signed(Proposal(slot=slot, value=value, votes=named), uid)
                identity = value_id(value)
                echo = self._signed(Echo(slot=slot, value=identity), uid)
                self._relay(CheckedRelay(uid, identity, echo, proposal, votes, proof), now)
            case Repeat(other):
                echo = self._signed(Echo(slot=other.slot, value=other.id), uid)
                self._relay(CheckedRelay(uid, other.id, echo, other.proposal, other.votes, other.proof), now)
            case Commit(proof, votes, others):
                own = {uid: self._signed(Commitment(value=proof.id), uid)}
                decision = CheckedDecision(uid, proof, votes, {**others, **own})
                machine.decision(decision)
                self._outcome.committed.setdefault(uid, self._publish(Wanted("decision", uid, 0), decision, uid, now))

    def _relay(self, relay: CheckedRelay, now: float) -> None:
        self._nodes[relay.uid].machine.relay(relay)
        self._publish(Wanted("relay", relay.uid, relay.slot), relay, relay.uid, now)

    def _signed(self, document: Document, uid: int) -> Signed[Any]:
        """Return the document as if elector ``uid`` had signed it; the signature is empty."""
        author = Author(RUN, uid, self._electors.hotkey(uid))
        return Signed(document, document.kind, self._window, author, body_sha256(document), b"")
