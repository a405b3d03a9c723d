"""A network of electors in discrete time, with an adversary: agreement, progress, and nobody honest is left out.

The adversary sees everything at once. It shows each reader other documents, in any order, any number of them, changes
and withholds them, and delays honest documents by up to Delta. It can't sign for others.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tplr.exchange.election import SLOT, Action, Commit, Election, Propose, Repeat, SendStatus, Wanted
from tplr.exchange.envelope import Author, Run, Signed, body_sha256
from tplr.exchange.quorum import WindowQuestion, void
from tplr.schemas import Document, PeerList, Reason

RUN, WINDOW, DELTA = Run(3, "1"), 7, 3.0
Checked = Signed[Vote] | CheckedRelay | CheckedStatus | CheckedDecision


def signed(document: Document, uid: int) -> Signed:
    """As if elector ``uid`` had signed it: signatures are checked before anything gets here."""
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
    """A vote for a variant of each uid's update."""
    return Vote(
        found={str(uid): sha(uid, variant) for uid, variant in found.items()},
        missing={str(uid): Reason.MISSING for uid in peers if uid not in found},
        peers=None,
    )


@dataclass
class Network:
    """Honest electors and what they have published, with the time from which each reader sees it."""

    stakes: dict[int, int]
    hostile: frozenset[int]
    seed: int
    miners: tuple[int, ...] = (100, 101, 102)
    played: tuple[int, ...] = (103, 104)  # miners that show different electors different bytes
    chaos: float = 0.5
    electors: Electors = field(init=False)
    published: dict[tuple[Wanted, int], tuple[float, Checked]] = field(default_factory=dict)
    proposals: dict[int, list[CheckedRelay]] = field(default_factory=dict)
    echoes: dict[tuple[int, str], dict[int, Signed[Echo]]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    committed: dict[int, CheckedProof] = field(default_factory=dict)
    committed_at: dict[int, float] = field(default_factory=dict)
    shown: dict[tuple[Wanted, int], tuple[float, Checked | None]] = field(default_factory=dict)
    delays: tuple[float, ...] = (0.0, 1.0, DELTA)
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

    # What honest electors do

    def run(self, slots: int) -> None:
        for uid in self.honest:
            self.nodes[uid].vote(self.votes[uid][0])
            self._publish(Wanted("vote", uid, 0), self.votes[uid][0], 0.0)
        for tick in range(int(slots * SLOT * DELTA)):
            order = [*self.honest]
            self.draw.shuffle(order)
            for uid in order:
                self._round(uid, float(tick))

    def _round(self, uid: int, now: float) -> None:
        node = self.nodes[uid]
        for wanted in node.wanted(now):
            self.requests += 1
            if wanted.uid in self.hostile:
                found = self._shown(wanted, uid, now)
            else:
                since, found = self.published.get((wanted, uid), (float("inf"), None))
                found = found if since <= now else None
            if found is not None:
                self._feed(node, found)
        while actions := node.act(now, now):
            for action in actions:
                self._say(uid, action, now)

    @staticmethod
    def _feed(node: Election, found: Checked) -> None:
        match found:
            case CheckedRelay():
                node.relay(found)
            case CheckedStatus():
                node.status(found)
            case CheckedDecision():
                node.decision(found)
            case _:
                node.vote(found)

    def _say(self, uid: int, action: Action, now: float) -> None:
        node = self.nodes[uid]
        match action:
            case Propose(slot, value, votes, proof):
                named = {str(voter): one.sha256 for voter, one in votes.items()}
                proposal = signed(Proposal(slot=slot, value=value, votes=named), uid)
                relay = self._relay(uid, self._proposed(uid, value, proposal, votes, proof), slot)
            case Repeat(other):
                relay = self._relay(uid, other, other.slot)
            case SendStatus(slot, votes, proof):
                self._publish(Wanted("status", uid, slot), CheckedStatus(uid, slot, votes, proof), now)
                return
            case Commit(proof, votes, others):
                own = {uid: signed(Commitment(value=proof.id), uid)}
                decision = CheckedDecision(uid, proof, votes, {**others, **own})
                node.decision(decision)
                assert self.committed.setdefault(uid, proof).id == proof.id
                self.committed_at.setdefault(uid, now)
                for slot in range(int(now // (SLOT * DELTA)), 64):
                    self._publish(Wanted("decision", uid, slot), decision, now)
                return
        node.relay(relay)
        self.proposals.setdefault(relay.slot, []).append(relay)
        self._publish(Wanted("relay", uid, relay.slot), relay, now)

    @staticmethod
    def _proposed(
        uid: int,
        value: Value,
        proposal: Signed[Proposal],
        votes: Mapping[int, Signed[Vote]],
        proof: CheckedProof | None,
    ) -> CheckedRelay:
        echo = signed(Echo(slot=proposal.document.slot, value=value_id(value)), uid)
        return CheckedRelay(uid, value_id(value), echo, proposal, votes, proof)

    def _relay(self, uid: int, other: CheckedRelay, slot: int) -> CheckedRelay:
        echo = signed(Echo(slot=slot, value=other.id), uid)
        self.echoes.setdefault((slot, other.id), {})[uid] = echo
        self.values[other.id] = other.value
        return CheckedRelay(uid, other.id, echo, other.proposal, other.votes, other.proof)

    def _publish(self, what: Wanted, document: Checked, now: float) -> None:
        for reader in self.honest:
            delay = self.draw.choice(self.delays)
            self.published[what, reader] = (now + delay, document)

    # What the adversary does

    def _shown(self, wanted: Wanted, reader: int, now: float) -> Checked | None:
        """Each reader sees a document of its own, from a time of its own on, or never; sometimes another one later."""
        since, document = self.shown.get((wanted, reader), (-1.0, None))
        if since < 0:
            into = self.draw.choice((0.0, self.draw.uniform(0.0, SLOT * DELTA)))
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
        """Of honest echoes, and any number of its own."""
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
        return self._relay(uid, self.draw.choice(known), slot) if known else None

    def _false_proposals(self, proposer: int, slot: int) -> list[CheckedRelay]:
        made = []
        for _ in range(self.draw.randrange(1, 4)):
            votes, proof = self._some_votes(), self._some_proof() if self.draw.random() < 0.5 else None
            value = self.question.tally({voter: one.document for voter, one in votes.items()}, self.electors, slot)
            if proof:
                votes, value = {}, proof.value
            if value is None or self.draw.random() < 0.1:
                value = void(WINDOW, "1")
            named = {str(voter): one.sha256 for voter, one in votes.items()}
            proposal = signed(Proposal(slot=slot, value=value, votes=named), proposer)
            self.values[value_id(value)] = value
            made.append(self._proposed(proposer, value, proposal, votes, proof))
        return made


@st.composite
def networks(draw: st.DrawFn, *, over_half: bool = False) -> Network:
    """Electors of which the adversary holds as much as it can below (above) half of the stake."""
    count = draw(st.integers(2, 6))
    stakes = {uid: draw(st.integers(1, 50)) for uid in range(count)}
    hostile = draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    while 2 * sum(stakes[uid] for uid in hostile) >= sum(stakes.values()):
        hostile.remove(max(hostile, key=lambda uid: stakes[uid]))
    return Network(
        stakes,
        frozenset(hostile),
        draw(st.integers(0, 2**32)),
        chaos=draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0))),
        delays=draw(st.sampled_from(((0.0,), (DELTA,), (0.0, DELTA), (0.0, 1.0, DELTA)))),
    )


def check(network: Network) -> None:
    """All that the docstring of ``exchange/election.py`` says."""
    assert network.committed.keys() == set(network.honest), "not all have committed"
    values = {proof.id: proof.value for proof in network.committed.values()}
    assert len(values) == 1, f"{len(values)} values"
    (value,) = values.values()
    included = {one.uid: one.sha256 for one in value.included.included}
    assert all(included.get(miner) == sha(miner) for miner in network.miners), f"left out: {included}"
    known = [network.votes[uid][0].document.found for uid in network.honest]
    assert all(any(found.get(str(uid)) == sha256 for found in known) for uid, sha256 in included.items())


@settings(max_examples=80, deadline=None)
@given(networks())
def test_the_honest_agree_in_as_many_slots_as_there_are_electors(network: Network) -> None:
    network.run(slots=len(network.stakes))
    check(network)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_if_all_is_well_the_first_slot_decides(count: int) -> None:
    network = Network({uid: 100 - uid for uid in range(count)}, frozenset(), seed=1)
    network.run(slots=1)
    check(network)
    assert {proof.slot for proof in network.committed.values()} == {0}


def test_alone_an_elector_commits_at_once() -> None:
    network = Network({0: 5}, frozenset(), seed=1)
    network._round(0, 0.0)
    assert not network.committed  # it has not voted
    network.nodes[0].vote(network.votes[0][0])
    network._round(0, 0.0)
    assert (network.committed_at, network.requests) == ({0: 0.0}, 0)


def test_the_silent_stop_nobody() -> None:
    network = Network({0: 40, 1: 30, 2: 30}, frozenset({0}), seed=1, chaos=0.0)
    network.run(slots=2)
    check(network)
    assert {proof.slot for proof in network.committed.values()} == {1}


def test_more_than_half_of_the_stake_can_decide_what_it_wants() -> None:
    """The bound: the same adversary with 52 % of the stake."""
    seen = set()
    for seed in range(60):
        network = Network({0: 52, 1: 24, 2: 24}, frozenset({0}), seed=seed, chaos=0.9)
        network.run(slots=3)
        values = {proof.id: proof.value for proof in network.committed.values()}
        left_out = any(len(value.included.included) < len(network.miners) for value in values.values())
        seen |= {"two values"} if len(values) > 1 else set()
        seen |= {"an honest update left out"} if left_out else set()
    assert seen == {"two values", "an honest update left out"}


def test_a_vote_that_is_shown_to_one_elector_costs_one_slot() -> None:
    """0 proposes; 3, which is hostile, shows its vote to 1 alone, which demands an update that 0 can't support."""
    network = Network({0: 20, 1: 19, 2: 16, 3: 45}, frozenset({3}), seed=1, chaos=0.0, played=(103,))
    network.votes[1] = [signed(vote(dict.fromkeys((*network.miners, 103), 0), ()), 1)]
    network.votes[0] = [signed(vote(dict.fromkeys(network.miners, 0), ()), 0)]
    network.votes[2] = [signed(vote(dict.fromkeys(network.miners, 0), ()), 2)]
    network.votes[3] = [signed(vote({103: 0}, ()), 3)]
    network.nodes[1].vote(network.votes[3][0])
    network.run(slots=3)
    check(network)
    (value,) = {proof.id: proof.value for proof in network.committed.values()}.values()
    # The proposers: 3, silent; 0, which knows of the vote by now, as 1 has published it.
    assert {proof.slot for proof in network.committed.values()} == {1}
    assert [one.uid for one in value.included.included] == [*network.miners, 103]


def relay(slot: int, uid: int, proposer: int, value: Value) -> CheckedRelay:
    """The echo of elector ``uid`` of what ``proposer`` proposed."""
    echo, proposal = Echo(slot=slot, value=value_id(value)), Proposal(slot=slot, value=value, votes={})
    return CheckedRelay(uid, value_id(value), signed(echo, uid), signed(proposal, proposer), {}, None)


def test_who_signs_two_ballots_is_named_and_nobody_else() -> None:
    electors = Electors(tuple(Elector(uid, f"key-{uid}", 10 - uid) for uid in range(4)))
    election = Election(electors, 3, question((100,), void_from=9), DELTA)
    one, other = void(WINDOW, "1"), void(WINDOW, "1").model_copy(update={"peers": question((7,), 9).listed})
    for uid in range(3):
        election.vote(signed(vote({100: 0}, (100,)), uid))
        election.relay(relay(0, uid, 0, one))
    assert election.equivocators == set()
    election.vote(signed(vote({100: 1}, (100,)), 2))
    assert election.equivocators == {2}
    election.relay(relay(0, 1, 0, other))  # an honest elector repeats it: its proposer signed both
    assert election.equivocators == {0, 2}
