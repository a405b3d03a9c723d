"""A network of electors in simulated time, and an adversary.

An elector reads in rounds, and acts at the end of each. The adversary sees everything at once. It shows each reader
other documents, in any order, any number of them, changes and withholds them, and delays honest documents: a reader
may find one only in its last round that ends within Delta. It can't sign for others.
"""

import heapq
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tplr.chain.electors import Elector, Electors
from tplr.exchange.ballots import (
    CheckedDecision,
    CheckedProof,
    CheckedRelay,
    CheckedStatus,
    Commitment,
    Echo,
    Proposal,
    Value,
    Vote,
    value_id,
)
from tplr.exchange.election import PROPOSE_UNTIL, SLOT, Action, Commit, Election, Propose, Repeat, SendStatus, Wanted
from tplr.exchange.envelope import Author, Run, Signed, body_sha256
from tplr.exchange.quorum import WindowQuestion, void
from tplr.schemas import Document, PeerList, Reason

RUN, WINDOW, DELTA = Run(3, "1"), 7, 3.0
PAUSE = 0.5  # seconds between an elector's rounds of reading
# Lengths of rounds, in seconds. Two rounds and pauses take at most Delta, so each document can be read within Delta.
# An action is taken at the end of a round, so with long rounds it may be too late for its slot.
AT_ONCE, LONG_ROUNDS = (0.0,), (0.0, 0.5, 1.0)
Checked = Signed[Vote] | CheckedRelay | CheckedStatus | CheckedDecision


def signed(document: Document, uid: int) -> Signed:
    """Return the document as if elector ``uid`` had signed it; signatures are checked before this point."""
    return Signed(document, document.kind, WINDOW, Author(RUN, uid, f"key-{uid}"), body_sha256(document), b"")


def question(peers: Iterable[int], void_from: int) -> WindowQuestion:
    listed = PeerList(
        peers=tuple(peers), reserve_peers=(), initial_selection=False, sync_window=1, first_effective_window=3
    )
    return WindowQuestion(
        window=WINDOW,
        version="1",
        listed=listed,
        size=100,
        at_most=20,
        effective=WINDOW + 3,
        lists_until=1,
        void_from=void_from,
    )


def sha(uid: int, variant: int = 0) -> str:
    return f"{uid:032x}{variant:032x}"


def vote(found: dict[int, int], peers: Iterable[int]) -> Vote:
    """Return a vote for a variant of each uid's update."""
    return Vote(
        found={str(uid): sha(uid, variant) for uid, variant in found.items()},
        missing={str(uid): Reason.MISSING for uid in peers if uid not in found},
        peers=None,
    )


def proposed(
    uid: int,
    slot: int,
    value: Value,
    votes: Mapping[int, Signed[Vote]] | None = None,
    proof: CheckedProof | None = None,
) -> CheckedRelay:
    """Return the relay of a proposer, which echoes its own proposal."""
    named = {str(voter): one.sha256 for voter, one in (votes or {}).items()}
    proposal = signed(Proposal(slot=slot, value=value, votes=named), uid)
    echo = signed(Echo(slot=slot, value=value_id(value)), uid)
    return CheckedRelay(uid, value_id(value), echo, proposal, votes or {}, proof)


def repeated(uid: int, other: CheckedRelay) -> CheckedRelay:
    """Return the relay of an elector that echoes another elector's document."""
    echo = signed(Echo(slot=other.slot, value=other.id), uid)
    return CheckedRelay(uid, other.id, echo, other.proposal, other.votes, other.proof)


def proof_of(slot: int, value: Value, uids: Iterable[int]) -> CheckedProof:
    """Echoes of these electors."""
    identity = value_id(value)
    return CheckedProof(slot, value, identity, {uid: signed(Echo(slot=slot, value=identity), uid) for uid in uids})


def decision_of(uid: int, proof: CheckedProof, uids: Iterable[int] = ()) -> CheckedDecision:
    """Return the decision of ``uid``, which shows that these electors are also committed."""
    committed = {one: signed(Commitment(value=proof.id), one) for one in {uid, *uids}}
    return CheckedDecision(uid, proof, {}, committed)


def carried_out(uid: int, action: Action) -> CheckedRelay | CheckedStatus | CheckedDecision:
    """The ballot that elector ``uid`` publishes."""
    match action:
        case Propose(slot, value, votes, proof):
            return proposed(uid, slot, value, votes, proof)
        case Repeat(other):
            return repeated(uid, other)
        case SendStatus(slot, votes, proof):
            return CheckedStatus(uid, slot, votes, proof)
        case Commit(proof, votes, others):
            own = signed(Commitment(value=proof.id), uid)
            return CheckedDecision(uid, proof, votes, {**others, uid: own})


@dataclass
class Network:
    """Honest electors and their documents: each version with its time, and the time from which each reader sees it.

    Attributes:
        by_echoes: proofs to which electors committed because of a slot's echoes, not because others had decided.
        rounds: possible lengths of a round of reading, in seconds: ``AT_ONCE`` or ``LONG_ROUNDS``.
    """

    stakes: dict[int, int]
    hostile: frozenset[int]
    seed: int
    miners: tuple[int, ...] = (100, 101, 102)
    played: tuple[int, ...] = (103, 104)  # miners that show different electors different bytes
    chaos: float = 0.5
    electors: Electors = field(init=False)
    published: dict[tuple[Wanted, int], list[tuple[float, float, Checked]]] = field(default_factory=dict)
    proposals: dict[int, list[CheckedRelay]] = field(default_factory=dict)
    echoes: dict[tuple[int, str], dict[int, Signed[Echo]]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    committed: dict[int, CheckedProof] = field(default_factory=dict)
    committed_at: dict[int, float] = field(default_factory=dict)
    by_echoes: list[CheckedProof] = field(default_factory=list)
    shown: dict[tuple[Wanted, int], tuple[float, Checked | None]] = field(default_factory=dict)
    delays: tuple[float, ...] = (0.0, 1.0, DELTA)
    rounds: tuple[float, ...] = AT_ONCE
    requests: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        ranked = sorted(self.stakes, key=lambda uid: (-self.stakes[uid], uid))
        self.electors = Electors(tuple(Elector(uid, f"key-{uid}", self.stakes[uid]) for uid in ranked))
        self.question = question((*self.miners, *self.played), void_from=len(ranked))
        self.honest = [uid for uid in ranked if uid not in self.hostile]
        self.nodes = {uid: Election(self.electors, uid, self.question, DELTA) for uid in self.honest}
        everyone = (*self.miners, *self.played)
        self.votes: dict[int, list[Signed[Vote]]] = {}
        for uid in ranked:
            several = range(3 if uid in self.hostile else 1)
            self.votes[uid] = [signed(vote(self._found(uid), everyone), uid) for _ in several]

    def _found(self, uid: int) -> dict[int, int]:
        played = {miner: self.draw.randrange(2) for miner in self.played if self.draw.random() < 0.7}
        if uid not in self.hostile:
            return dict.fromkeys(self.miners, 0) | played
        lies = {miner: self.draw.choice((0, 0, 1)) for miner in self.miners if self.draw.random() < 0.5}
        return lies | played

    # Actions of honest electors

    def run(self, slots: int) -> None:
        for uid in self.honest:
            self.nodes[uid].vote(self.votes[uid][0])
            self._publish(Wanted("vote", uid, 0), self.votes[uid][0], 0.0)
        ends = [(0.0, self.draw.random(), uid, 0.0) for uid in self.honest]
        heapq.heapify(ends)
        while ends[0][0] < slots * SLOT * DELTA:
            now, _, uid, began = heapq.heappop(ends)
            self._round(uid, began, now)
            begins = now + PAUSE
            heapq.heappush(ends, (begins + self.draw.choice(self.rounds), self.draw.random(), uid, begins))

    def _round(self, uid: int, began: float, now: float) -> None:
        """Read what ``uid`` asks for, each document at some time of the round, and act at its end."""
        node = self.nodes[uid]
        for wanted in node.wanted(began):
            self.requests += 1
            at = self.draw.uniform(began, now)
            found = self._shown(wanted, uid, at) if wanted.uid in self.hostile else self._read(wanted, uid, at, now)
            if found is not None:
                self.feed(node, found)
        while actions := node.act(began, now):
            for action in actions:
                self._say(uid, action, now)

    def _read(self, wanted: Wanted, reader: int, at: float, ends: float) -> Checked | None:
        """Return the newest version that is shown at ``at``, or is due: the next round may end later than Delta."""
        versions, next_end = self.published.get((wanted, reader), []), ends + PAUSE + max(self.rounds)
        shown = [one for said, since, one in versions if since <= at or next_end > said + DELTA]
        return shown[-1] if shown else None

    @staticmethod
    def feed(node: Election, found: Checked, *, restored: bool = False) -> None:
        """Pass a ballot to an election, by its kind."""
        match found:
            case CheckedRelay():
                node.relay(found, restored=restored)
            case CheckedStatus():
                node.status(found)
            case CheckedDecision():
                node.decision(found)
            case _:
                node.vote(found)

    def _say(self, uid: int, action: Action, now: float) -> None:
        document, node = carried_out(uid, action), self.nodes[uid]
        if isinstance(document, CheckedRelay):
            self._note(document)
            node.relay(document)
            self.proposals.setdefault(document.slot, []).append(document)
            self._publish(Wanted("relay", uid, document.slot), document, now)
        elif isinstance(document, CheckedStatus):
            self._publish(Wanted("status", uid, document.slot), document, now)
        else:
            if node.decided is None:
                self.by_echoes.append(document.proof)
            node.decision(document)
            assert self.committed.setdefault(uid, document.proof).id == document.proof.id
            self.committed_at.setdefault(uid, now)
            for slot in range(int(now // (SLOT * DELTA)), 64):
                self._publish(Wanted("decision", uid, slot), document, now)

    def _note(self, relay: CheckedRelay) -> CheckedRelay:
        """Record an echo, because proofs consist of echoes."""
        self.echoes.setdefault((relay.slot, relay.id), {})[relay.uid] = relay.echo
        self.values[relay.id] = relay.value
        return relay

    def _publish(self, what: Wanted, document: Checked, now: float) -> None:
        for reader in self.honest:
            delay = self.draw.choice(self.delays)
            self.published.setdefault((what, reader), []).append((now, now + delay, document))

    # Actions of the adversary

    def _shown(self, wanted: Wanted, reader: int, now: float) -> Checked | None:
        """Each reader sees a different document, from a different time on, or never; sometimes a second one later."""
        since, document = self.shown.get((wanted, reader), (-1.0, None))
        if since < 0:
            # At once, before honest electors read each other's relays, at any time, or just before a bound.
            early, later = (self.draw.uniform(0.0, bound * DELTA) for bound in (PROPOSE_UNTIL, SLOT))
            into = self.draw.choice((0.0, early, later, self.draw.randint(1, SLOT) * DELTA - 1))
            since = now + (into if self.draw.random() < self.chaos else 1e9)
            self.shown[wanted, reader] = (since, None)
        if now < since:
            return None
        if document is None or self.draw.random() < 0.1:
            document = self._hostile(wanted)
            self.shown[wanted, reader] = (since, document)
        return document

    def _hostile(self, wanted: Wanted) -> Checked | None:
        match wanted.kind:
            case "vote":
                return self.draw.choice(self.votes[wanted.uid])
            case "relay":
                return self._false_relay(wanted.uid, wanted.slot)
            case "status":
                return CheckedStatus(wanted.uid, wanted.slot, self._some_votes(), self._some_proof())
            case _:
                proof = self._some_proof()
                own = {uid: signed(Commitment(value=proof.id), uid) for uid in self.hostile} if proof else {}
                return proof and CheckedDecision(wanted.uid, proof, {}, own)

    def _some_votes(self) -> dict[int, Signed[Vote]]:
        kept = [uid for uid in self.electors.uids if self.draw.random() < 0.8]
        return {uid: self.draw.choice(self.votes[uid]) for uid in kept}

    def _some_proof(self) -> CheckedProof | None:
        """Return a proof of honest echoes and any number of the adversary's own echoes."""
        proofs = []
        for (slot, identity), echoes in self.echoes.items():
            own = {uid: signed(Echo(slot=slot, value=identity), uid) for uid in self.hostile}
            if self.electors.outweighs({*echoes, *own}):
                proofs.append(CheckedProof(slot, self.values[identity], identity, echoes | own))
        return self.draw.choice(proofs) if proofs else None

    def _false_relay(self, uid: int, slot: int) -> CheckedRelay | None:
        proposer = self.electors.proposer(slot)
        if proposer in self.hostile:
            self.proposals.setdefault(slot, self._false_proposals(proposer, slot))
        known = self.proposals.get(slot)
        return self._note(repeated(uid, self.draw.choice(known))) if known else None

    def _false_proposals(self, proposer: int, slot: int) -> list[CheckedRelay]:
        made = []
        for _ in range(self.draw.randrange(1, 4)):
            votes, proof = self._some_votes(), self._some_proof() if self.draw.random() < 0.5 else None
            value = self.question.tally({voter: one.document for voter, one in votes.items()}, self.electors, slot)
            if proof:
                votes, value = {}, proof.value
            if value is None or self.draw.random() < 0.1:
                value = void(WINDOW, "1")
            self.values[value_id(value)] = value
            made.append(proposed(proposer, slot, value, votes, proof))
        return made
