"""The state machine of one elector for one value: what to publish and when, from what it has read. No I/O, no clock.

This is Sync HotStuff (https://eprint.iacr.org/2019/270) for a single value, over buckets instead of messages. Delta is
the longest time from an honest elector's decision to publish something until every other honest elector has read it:
put, poll, get, and the difference of their clocks. Times are in seconds; time 0 is when each update of the window is
either accepted or ruled out. Slot r lasts six Delta and has one proposer, the elector of rank ``r mod n``:

===========  ===========================================================================================
from, Delta  what
===========  ===========================================================================================
0            each elector publishes a status: the votes it has seen, and its lock; in slot 0 its vote
1            the proposer proposes the tally of the votes, or the value of the latest proof; in slot 0 as
             soon as it has all votes
until 3      an elector that has seen exactly one proposal, and accepts it, echoes it with its votes or proof
until 5      two Delta after its echo and not before 3, or as soon as all have echoed, an elector commits if
             echoes of more than half of the stake are for the value, and it has seen no other proposal
until 6      decisions reach all electors: each reader of a decision's proof is locked on its value
===========  ===========================================================================================

*Agreement*, if the others hold at most half of the stake and Delta holds: let honest A echo v at time t of slot r,
and commit to it at t + two Delta or at three Delta, whichever is later. Suppose that honest B echoes another value.
Until two Delta B reads only the proposer's relay, so it may not know A's echo; but A reads B's echo by three Delta.
From two Delta on B reads all relays. If it echoes before t + Delta, A reads that echo by t + two Delta; after t + Delta
it has seen two proposals, and echoes neither. So A has seen two proposals, and does not commit. If all have echoed v,
there is no such B. So no other value has a proof of slot r, which needs an honest echo, all honest electors are locked
on v before slot r + 1, and by induction accept nothing else later.

*Progress*, if honest electors hold more than half: at the start of slot r an honest elector publishes everything that
it demands of a proposal, its lock and the votes it has seen. An honest proposer has read this one Delta later, so all
honest electors accept its proposal by two Delta and commit by four. So n slots decide.

*An honest miner's update is included* if all honest electors found it: each of them demands it of every proposal.
*Nothing false is included*: a hash needs votes of more than half, so at least one honest elector had the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tplr.chain.electors import Electors
from tplr.exchange.ballots import (
    CheckedDecision,
    CheckedProof,
    CheckedRelay,
    CheckedStatus,
    Commitment,
    Echo,
    Value,
    Vote,
    value_id,
)
from tplr.exchange.envelope import Signed
from tplr.exchange.quorum import Question, supported, tally_lost

# In Delta, from the start of a slot.
PROPOSE_FROM, PROPOSE_UNTIL, ECHO_UNTIL, COMMIT_UNTIL, SLOT = 1, 2, 3, 5, 6
COMMIT_AFTER = 2  # after this elector's own echo
# From the start of a slot: an elector may echo until PROPOSE_UNTIL without having read the others' relays, and its echo
# is read one Delta later.
COMMIT_FROM = PROPOSE_UNTIL + 1
# A decision is written again when it has more commitments, and R2 accepts one write per second for a key.
DECISION_POLL_SECONDS = 1.1


class SendStatus(NamedTuple):
    """Publish the votes and the proof that this elector has at the start of a slot."""

    slot: int
    votes: Mapping[int, Signed[Vote]]
    proof: CheckedProof | None


class Propose(NamedTuple):
    """Propose and echo a value."""

    slot: int
    value: Value
    votes: Mapping[int, Signed[Vote]]
    proof: CheckedProof | None


class Repeat(NamedTuple):
    """Echo another elector's proposal."""

    relay: CheckedRelay


class Commit(NamedTuple):
    """Publish a decision: a commitment to a value, with the known commitments of other electors."""

    proof: CheckedProof
    votes: Mapping[int, Signed[Vote]]
    commitments: Mapping[int, Signed[Commitment]]


Action = SendStatus | Propose | Repeat | Commit
Kind = Literal["vote", "relay", "status", "decision"]


class Wanted(NamedTuple):
    """A document of another elector to read now."""

    kind: Kind
    uid: int
    slot: int


@dataclass
class _Slot:
    """The known documents of one slot: the first relay of each proposed value, and echoes by value and elector."""

    proposals: dict[str, CheckedRelay] = field(default_factory=dict)
    echoes: dict[str, dict[int, Signed[Echo]]] = field(default_factory=dict)
    statuses: set[int] = field(default_factory=set)

    @property
    def relays(self) -> set[int]:
        """Electors whose relay has been read."""
        return {uid for by in self.echoes.values() for uid in by}


@dataclass(frozen=True)
class _OwnEcho:
    """This elector's own echo of a slot and its time, which is infinite if the echo is from before a restart.

    The time is at least 0, because the other electors read from time 0 on.
    """

    id: str
    at: float


class Election:
    """Decides what one elector publishes in one election.

    Feed it each document that was read, then call ``act`` for the actions to publish. Feed it the signed ballots of
    these actions before the next call of ``act``.

    Attributes:
        committed: the value that this elector is committed to, and its proof.
        decided: the value that electors with more than half of the stake are committed to.
        finished: a value is decided, and this elector has published the commitments that prove it.
        evidence: pairs of different votes that one elector signed.
    """

    def __init__(self, electors: Electors, uid: int, question: Question, delta: float) -> None:
        """``uid``: this elector's; ``delta``: in seconds."""
        self.committed: CheckedProof | None = None
        self.decided: CheckedProof | None = None
        self.finished = False
        self.evidence: list[tuple[Signed[Vote], Signed[Vote]]] = []
        self._electors = electors
        self._uid = uid
        self._question = question
        self._delta = delta
        self._votes: dict[int, Signed[Vote]] = {}
        self._slots: dict[int, _Slot] = {}
        self._decisions: set[int] = set()
        self._commitments: dict[str, dict[int, Signed[Commitment]]] = {}
        self._read_decisions_at = float("inf")  # time of the next read of decisions after this elector's own commitment
        self._own_echoes: dict[int, _OwnEcho] = {}
        self._lock: CheckedProof | None = None
        # As of the start of the present slot.
        self._slot = -1
        self._demanded: dict[int, Signed[Vote]] | None = None
        self._slot_lock: CheckedProof | None = None

    @property
    def equivocators(self) -> set[int]:
        """Electors that signed two different votes, or two different proposals of one slot."""
        proposers = {self._electors.proposer(slot) for slot, one in self._slots.items() if len(one.proposals) > 1}
        return proposers | {vote.author.uid for vote, _ in self.evidence}

    # Documents that were read

    def vote(self, vote: Signed[Vote]) -> None:
        """Record a vote of this elector or another."""
        known = self._votes.setdefault(vote.author.uid, vote)
        if known.sha256 != vote.sha256:
            self.evidence.append((known, vote))

    def relay(self, relay: CheckedRelay, *, restored: bool = False) -> None:
        """Record a relay of this elector or another. ``restored``: this elector's own, from before a restart."""
        for vote in relay.votes.values():
            self.vote(vote)
        slot = self._slots.setdefault(relay.slot, _Slot())
        slot.proposals.setdefault(relay.id, relay)
        echoes = slot.echoes.setdefault(relay.id, {})
        echoes[relay.uid] = relay.echo
        if self._electors.outweighs(echoes):
            self._prove(CheckedProof(relay.slot, relay.value, relay.id, dict(echoes)))
        if relay.proof:
            self._prove(relay.proof)
        if restored:
            self._own_echoes[relay.slot] = _OwnEcho(relay.id, float("inf"))

    def status(self, status: CheckedStatus) -> None:
        """Record the status of another elector at the start of a slot."""
        self._slots.setdefault(status.slot, _Slot()).statuses.add(status.uid)
        for vote in status.votes.values():
            self.vote(vote)
        if status.proof:
            self._prove(status.proof)

    def decision(self, decision: CheckedDecision) -> None:
        """Record a decision of this elector or another."""
        self._decisions.add(decision.uid)
        for vote in decision.votes.values():
            self.vote(vote)
        self._prove(decision.proof)
        if decision.uid == self._uid:
            self.committed = decision.proof
        known = self._commitments.setdefault(decision.proof.id, {})
        known |= decision.commitments
        if self._electors.outweighs(known):
            self.decided = decision.proof
            self.finished |= self._uid in decision.commitments and self._electors.outweighs(decision.commitments)

    def unpublished(self) -> None:
        """Reset the last commitment, which could not be published, so that ``act`` returns it again."""
        self.committed = None

    def _prove(self, proof: CheckedProof) -> None:
        if self._lock is None or proof.slot > self._lock.slot:
            self._lock = proof

    @property
    def votes(self) -> Mapping[int, Signed[Vote]]:
        """The first vote that was read of each elector."""
        return self._votes

    # What to read

    def slot_at(self, now: float) -> int:
        """Return the slot at time ``now``; 0 also before time 0, for an elector that has all updates early."""
        return max(0, int(now // (SLOT * self._delta)))

    def next_deadline(self, now: float) -> float:
        """Return the next time after ``now`` at which an action may be due even if no new document is read."""
        slot = self.slot_at(now)
        times = [(slot * SLOT + step) * self._delta for step in (PROPOSE_FROM, ECHO_UNTIL, SLOT)]
        if slot in self._own_echoes:
            times += [self._commits_from(slot, self._own_echoes[slot]), self._read_decisions_at]
        return min((time for time in times if time > now), default=now + self._delta)

    def wanted(self, now: float) -> list[Wanted]:
        """Return the documents to read in a round that begins ``now``: few if no elector is faulty."""
        slot = self.slot_at(now)
        state, others = self._slots.get(slot, _Slot()), [uid for uid in self._electors.uids if uid != self._uid]
        proposer, into = self._electors.proposer(slot), now - slot * SLOT * self._delta
        kinds: list[Wanted] = []
        if slot > max(0, self._slot) or now >= self._read_decisions_at:
            kinds += [Wanted("decision", uid, slot) for uid in others]
        elif slot > 0 and into < PROPOSE_UNTIL * self._delta:
            kinds += [Wanted("decision", uid, slot) for uid in others if uid not in self._decisions]
        if slot in self._own_echoes:
            relays = [] if self.committed else others
        elif proposer == self._uid:
            relays = []
            if slot > 0:
                kinds += [Wanted("status", uid, slot) for uid in others if uid not in state.statuses]
            else:
                kinds += [Wanted("vote", uid, slot) for uid in others if uid not in self._votes]
        else:
            relays = others if into >= PROPOSE_UNTIL * self._delta else [proposer]
            if slot == 0 and self._demanded is None and into >= PROPOSE_FROM * self._delta:
                kinds += [Wanted("vote", uid, slot) for uid in others if uid not in self._votes]
        if into < (COMMIT_UNTIL if slot in self._own_echoes else ECHO_UNTIL) * self._delta:
            kinds += [Wanted("relay", uid, slot) for uid in relays if uid not in state.relays]
        return kinds

    # What to publish

    def act(self, seen: float, now: float) -> list[Action]:
        """Return the actions that are due now.

        Args:
            seen: start of the last round of reading. All documents published by then have been read, except those in
                buckets that do not answer.
        """
        slot = self.slot_at(now)
        if self.finished or self.slot_at(seen) != slot:
            return []
        if self.decided:
            if self.committed and self.committed.id != self.decided.id:
                self.finished = True  # the adversary exceeds the protocol's assumptions: this can't be repaired
                return []
            return self._committing(self.decided, now)
        begun = slot * SLOT * self._delta
        actions: list[Action] = []
        if slot != self._slot:
            actions += self._enter(slot)
        if slot == 0 and self._demanded is None and seen >= PROPOSE_FROM * self._delta:
            self._demanded = dict(self._votes)
        actions += self._propose_or_echo(slot, seen - begun, now)
        actions += self._commit(slot, seen, now)
        return actions

    def _enter(self, slot: int) -> list[Action]:
        """Fix the lock and the votes that this elector demands of the slot's proposals, and publish them."""
        self._slot, self._slot_lock = slot, self._lock
        if slot == 0:
            return []
        self._demanded = dict(self._votes)
        return [SendStatus(slot, self._demanded, self._slot_lock)]

    def _propose_or_echo(self, slot: int, into: float, now: float) -> list[Action]:
        late = now - slot * SLOT * self._delta
        if slot in self._own_echoes:
            return []
        if self._electors.proposer(slot) == self._uid:
            all_voted = slot == 0 and len(self._votes) == len(self._electors.ranked)
            if late > PROPOSE_UNTIL * self._delta or not (all_voted or into >= PROPOSE_FROM * self._delta):
                return []
            return self._propose(slot, now)
        if into < PROPOSE_UNTIL * self._delta <= late:
            return []  # this round has not read the others' relays, and the next one will (``wanted``)
        relays = [*self._slots.get(slot, _Slot()).proposals.values()]
        if late > ECHO_UNTIL * self._delta or len(relays) != 1 or not self._accepts(relays[0]):
            return []
        self._own_echoes[slot] = _OwnEcho(relays[0].id, max(0.0, now))
        return [Repeat(relays[0])]

    def _propose(self, slot: int, now: float) -> list[Action]:
        if self._lock:
            action = Propose(slot, self._lock.value, {}, self._lock)
        else:
            value = self._tally(self._votes, slot)
            if value is None:
                return []
            action = Propose(slot, value, dict(self._votes), None)
        self._own_echoes[slot] = _OwnEcho(value_id(action.value), max(0.0, now))
        return [action]

    def _tally(self, votes: Mapping[int, Signed[Vote]], slot: int) -> Value | None:
        return self._question.tally({uid: vote.document for uid, vote in votes.items()}, self._electors, slot)

    def _accepts(self, relay: CheckedRelay) -> bool:
        """Return whether a proposal satisfies everything that this elector demands."""
        if relay.proof:
            follows = relay.proof.slot < relay.slot and relay.proof.id == relay.id
            return follows and (self._slot_lock is None or relay.proof.slot >= self._slot_lock.slot)
        if self._slot_lock and self._slot_lock.id != relay.id:
            return False
        value = self._tally(relay.votes, relay.slot)
        if value is None or value_id(value) != relay.id:
            return False
        if len(relay.votes) == len(self._electors.ranked):
            return True  # it counts every elector's vote, so every honest one
        return self._demanded is not None and self._demands(relay, self._demanded)

    def _demands(self, relay: CheckedRelay, known: Mapping[int, Signed[Vote]]) -> bool:
        """Return whether a proposal counts every update and lost window of this elector's vote with enough known votes.

        Votes are enough if they are of more than half of the stake.
        """
        mine = known[self._uid].document if self._uid in known else None
        if mine is None:
            return True
        # If an elector signed a different vote for the proposer, the proposer need not count the one known here.
        consistent = {uid: one.document for uid, one in known.items() if relay.votes.get(uid, one).sha256 == one.sha256}
        counted_votes = {uid: one.document for uid, one in relay.votes.items()}
        lost = [tally_lost(votes, self._electors, relay.proposal.window) for votes in (consistent, counted_votes)]
        if any(window not in lost[1] for window in lost[0] if window in mine.lost):
            return False
        counted, needed = (supported(votes, self._electors) for votes in (counted_votes, consistent))
        return all(counted.get(uid) == sha256 for uid, sha256 in needed.items() if mine.found.get(str(uid)) == sha256)

    def _commit(self, slot: int, seen: float, now: float) -> list[Action]:
        if self.committed:
            if seen >= self._read_decisions_at:
                self._read_decisions_at = now + self._delta
            return []
        state, own = self._slots.get(slot, _Slot()), self._own_echoes.get(slot)
        if own is None or len(state.proposals) != 1 or now > (slot * SLOT + COMMIT_UNTIL) * self._delta:
            return []
        echoes = state.echoes.get(own.id, {})
        waited = seen >= self._commits_from(slot, own)
        if self._uid not in echoes or not (waited or len(echoes) == len(self._electors.ranked)):
            return []
        if not self._electors.outweighs(echoes):
            return []
        return self._committing(CheckedProof(slot, state.proposals[own.id].value, own.id, dict(echoes)), now)

    def _commits_from(self, slot: int, own: _OwnEcho) -> float:
        """Return the time by which this elector has read each echo of another value, if not all have echoed."""
        return max(own.at + COMMIT_AFTER * self._delta, (slot * SLOT + COMMIT_FROM) * self._delta)

    def _committing(self, proof: CheckedProof, now: float) -> list[Action]:
        self.committed = proof
        self._read_decisions_at = now + DECISION_POLL_SECONDS
        relay = self._slots.get(proof.slot, _Slot()).proposals.get(proof.id)
        return [Commit(proof, relay.votes if relay else {}, dict(self._commitments.get(proof.id, {})))]
