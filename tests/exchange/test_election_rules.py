"""Each rule of an election alone: an elector's output and requests, given its inputs and the time.

Together with ``test_election.py``, which has networks of electors, these tests detect a change of any single rule.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from elections import (
    DELTA,
    WINDOW,
    Checked,
    Network,
    carried_out,
    decision_of,
    proof_of,
    proposed,
    question,
    repeated,
    sha,
    signed,
    vote,
)

from tplr.chain.electors import Elector, Electors
from tplr.exchange.ballots import CheckedProof, CheckedRelay, CheckedStatus, Value, Vote
from tplr.exchange.election import (
    COMMIT_AFTER,
    COMMIT_FROM,
    COMMIT_UNTIL,
    DECISION_POLL_SECONDS,
    ECHO_UNTIL,
    PROPOSE_FROM,
    PROPOSE_UNTIL,
    SLOT,
    Action,
    Commit,
    Election,
    Propose,
    Repeat,
    SendStatus,
    Wanted,
)
from tplr.exchange.envelope import Signed
from tplr.exchange.quorum import void

# Three have more than half of the stake; two do not.
ELECTORS = Electors(tuple(Elector(uid, f"key-{uid}", stake) for uid, stake in enumerate((24, 22, 20, 18, 16))))
QUESTION = question((100, 101), void_from=9)
EVERYBODY = range(5)
BEGINS = SLOT * DELTA  # of slot 1


def ballot(uid: int, *found: int) -> Signed[Vote]:
    return signed(vote(dict.fromkeys(found, 0), (100, 101)), uid)


# All have found 100; 0, 1 and 2 have also found 101.
VOTES = {uid: ballot(uid, 100, *([101] if uid < 3 else [])) for uid in EVERYBODY}


def votes_of(uids: Iterable[int]) -> dict[int, Signed[Vote]]:
    return {uid: VOTES[uid] for uid in uids}


def tally(uids: Iterable[int]) -> Value:
    value = QUESTION.tally({uid: one.document for uid, one in votes_of(uids).items()}, ELECTORS, 0)
    assert value is not None
    return value


BOTH, LESS = tally(EVERYBODY), tally((1, 2, 3, 4))  # without 0, too few have found 101
VOID = void(WINDOW, "1")


@dataclass
class One:
    """One elector. Its documents are published at once, unless its bucket fails."""

    uid: int
    fails: bool = False
    said: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.election = Election(ELECTORS, self.uid, QUESTION, DELTA)
        self.election.vote(VOTES[self.uid])

    def at(self, deltas: float, *, seen: float | None = None, slot: int = 0) -> list[Action]:
        """Return its actions at a time in Delta from the slot's beginning, in a round that began at ``seen`` Delta."""
        now, began = ((slot * SLOT + time) * DELTA for time in (deltas, deltas if seen is None else seen))
        actions: list[Action] = []
        while more := self.election.act(began, now):
            actions += more
            if self.fails:
                break
            for action in more:
                self.read(carried_out(self.uid, action))
        self.said += actions
        return actions

    def read(self, *documents: Checked) -> "One":
        for document in documents:
            Network.feed(self.election, document)
        return self

    def wanted(self, deltas: float, *, slot: int = 0) -> dict[str, list[int]]:
        """Return the uids whose documents it looks for, by kind."""
        kinds: dict[str, list[int]] = {}
        for one in self.election.wanted((slot * SLOT + deltas) * DELTA):
            kinds.setdefault(one.kind, []).append(one.uid)
        return kinds


def one(uid: int, *, knows: Iterable[int] = EVERYBODY) -> One:
    return One(uid).read(*votes_of(knows).values())


def proposal(slot: int, value: Value, voters: Iterable[int] = (), proof: CheckedProof | None = None) -> CheckedRelay:
    return proposed(ELECTORS.proposer(slot), slot, value, votes_of(voters), proof)


def echoes(slot: int, value: Value, uids: Iterable[int]) -> list[CheckedRelay]:
    """Return the relays of these electors; the slot's proposer has proposed."""
    return [repeated(uid, proposal(slot, value)) for uid in uids]


# Locks: a value echoed by electors with more than half of the stake may already be decided


SOURCES: dict[str, Callable[[CheckedProof], list[Checked]]] = {
    "echoes": lambda proof: [*echoes(proof.slot, proof.value, proof.echoes)],
    "a proposal": lambda proof: [repeated(4, proposal(proof.slot + 1, proof.value, proof=proof))],
    "a status": lambda proof: [CheckedStatus(4, 2, {}, proof)],
    "a decision": lambda proof: [decision_of(4, proof)],
}


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_an_elector_holds_to_the_newest_proof_wherever_it_has_read_it(source: str, newest_first: bool) -> None:
    elector = one(3)
    elector.at(0, slot=1)
    older, newer = proof_of(0, BOTH, (0, 1, 2)), proof_of(1, LESS, (1, 2, 4))
    for proof in (newer, older) if newest_first else (older, newer):
        elector.read(*SOURCES[source](proof))
    (status,) = elector.at(0, slot=3)
    assert isinstance(status, SendStatus)
    assert status.proof
    assert (status.slot, status.proof.slot, status.proof.value) == (3, 1, LESS)
    (action,) = elector.at(PROPOSE_FROM, slot=3)
    assert isinstance(action, Propose)
    assert (action.value, action.proof, action.votes) == (LESS, status.proof, {})


def test_echoes_of_half_are_no_proof() -> None:
    elector = one(3).read(*echoes(0, LESS, (0, 1)), *echoes(1, LESS, (2,)))
    (status,) = elector.at(0, slot=3)
    assert isinstance(status, SendStatus)
    assert status.proof is None


@pytest.mark.parametrize(
    ("proposal", "accepted"),
    [
        (proposal(3, BOTH, EVERYBODY), False),
        (proposal(3, LESS, (0, 1, 3, 4)), True),
        (proposal(3, BOTH, proof=proof_of(0, BOTH, (0, 1, 2))), False),
        (proposal(3, LESS, proof=proof_of(1, LESS, (1, 2, 4))), True),
        (proposal(3, BOTH, proof=proof_of(2, BOTH, (0, 1, 2))), True),
        (proposal(3, BOTH, proof=proof_of(2, LESS, (0, 1, 2))), False),
        (proposal(3, BOTH, proof=proof_of(3, BOTH, (0, 1, 2))), False),
    ],
    ids=["new", "the same", "older", "as new", "newer", "of another value", "of no earlier slot"],
)
def test_who_is_locked_accepts_its_value_or_a_proof_that_is_as_new(proposal: CheckedRelay, accepted: bool) -> None:
    elector = one(4).read(decision_of(0, proof_of(1, LESS, (1, 2, 3))))
    elector.at(0, slot=3)
    elector.read(proposal)
    assert [type(action) for action in elector.at(1.5, slot=3)] == ([Repeat] if accepted else [])


def test_what_an_elector_demands_in_a_slot_is_what_its_status_says() -> None:
    """A proof or a vote that is later shown only to this elector makes no honest proposer fail."""
    fresh = one(2, knows=(1, 3, 4))
    (status,) = fresh.at(0, slot=1)
    assert status == SendStatus(1, votes_of((1, 2, 3, 4)), None)
    fresh.read(decision_of(0, proof_of(0, BOTH, (0, 1, 2))), VOTES[0], proposal(1, LESS, (1, 2, 3, 4)))
    assert [type(action) for action in fresh.at(1.5, slot=1)] == [Repeat]


# Demands: updates that all honest electors have found are included


def test_nothing_is_accepted_before_an_elector_could_read_the_votes() -> None:
    """Otherwise the first proposer could leave out updates that others have found."""
    elector = one(2, knows=()).read(proposal(0, LESS, (1, 2, 3, 4)))
    assert elector.at(0.1) == []
    assert elector.wanted(PROPOSE_FROM)["vote"] == [0]  # the proposal has shown the others
    elector.read(*VOTES.values())
    assert elector.at(PROPOSE_FROM) == []
    assert "vote" not in elector.wanted(PROPOSE_FROM + 0.1)


def test_a_proposal_of_all_votes_is_accepted_at_once() -> None:
    elector = one(2, knows=()).read(proposal(0, BOTH, EVERYBODY))
    assert [type(action) for action in elector.at(0.1)] == [Repeat]


def test_a_proposal_without_the_votes_of_the_silent_is_accepted() -> None:
    elector = one(2, knows=(0, 1, 3)).read(proposal(0, BOTH, (0, 1, 2, 3)))
    assert elector.at(0.9 * PROPOSE_FROM) == []
    assert elector.at(1.1 * PROPOSE_FROM, seen=0.9 * PROPOSE_FROM) == []  # votes may have come since it read
    assert [type(action) for action in elector.at(PROPOSE_FROM)] == [Repeat]


def test_a_vote_that_comes_late_is_not_demanded() -> None:
    elector = one(2, knows=(1, 3, 4))
    assert elector.at(PROPOSE_FROM) == []
    elector.read(VOTES[0], proposal(0, LESS, (1, 2, 3, 4)))
    assert [type(action) for action in elector.at(1.5)] == [Repeat]


@pytest.mark.parametrize("slot", [0, 1])
def test_an_update_that_an_elector_found_and_knows_the_votes_of_is_demanded(slot: int) -> None:
    elector = one(2)
    elector.at(PROPOSE_FROM if slot == 0 else 0.0, slot=slot)
    elector.read(proposal(slot, LESS, (1, 2, 3, 4)))
    assert elector.at(1.5, slot=slot) == []


def test_an_update_that_an_elector_has_not_found_is_not_demanded() -> None:
    """So a vote that is shown to only one elector costs no slot, unless that elector has found the update itself."""
    elector = one(3)
    elector.at(PROPOSE_FROM)
    elector.read(proposal(0, LESS, (1, 2, 3, 4)))
    assert [type(action) for action in elector.at(1.5)] == [Repeat]


def test_the_vote_of_one_who_signed_another_for_the_proposer_is_not_demanded() -> None:
    elector = one(2)
    elector.at(PROPOSE_FROM)
    other = {0: ballot(0, 100), **votes_of((1, 2, 3))}
    elector.read(proposed(0, 0, LESS, other))
    assert [type(action) for action in elector.at(1.5)] == [Repeat]


@pytest.mark.parametrize(("uid", "accepted"), [(2, False), (3, True)])
def test_an_earlier_window_that_an_elector_and_enough_others_have_lost_is_demanded(uid: int, accepted: bool) -> None:
    votes = {voter: ballot(voter, 100) for voter in EVERYBODY}
    for voter in (0, 1, 2):
        votes[voter] = signed(votes[voter].document.model_copy(update={"lost": (WINDOW - 1,)}), voter)
    elector = One(uid)
    elector.election = Election(ELECTORS, uid, QUESTION, DELTA)
    elector.read(*votes.values()).at(PROPOSE_FROM)
    shown = {voter: votes[voter] for voter in (1, 2, 3, 4)}
    value = QUESTION.tally({voter: one.document for voter, one in shown.items()}, ELECTORS, 0)
    assert value is not None
    assert value.voided == ()
    elector.read(proposed(0, 0, value, shown))
    assert [type(action) for action in elector.at(1.5)] == ([Repeat] if accepted else [])


@pytest.mark.parametrize("value", [VOID, LESS])
def test_a_value_that_does_not_follow_from_its_votes_is_refused(value: Value) -> None:
    elector = one(4)
    elector.at(PROPOSE_FROM)
    assert elector.read(proposal(0, value, EVERYBODY)).at(1.5) == []


def test_a_value_of_too_few_votes_is_refused() -> None:
    elector = one(4)
    elector.at(PROPOSE_FROM)
    assert elector.read(proposal(0, VOID, (3, 4))).at(1.5) == []


# Proposals


def test_the_first_proposer_waits_for_all_votes_or_delta() -> None:
    assert [type(action) for action in one(0).at(0.2)] == [Propose]
    elector = one(0, knows=(1, 2))
    assert elector.at(0.9) == elector.at(1.1, seen=0.9) == []
    (action,) = elector.at(1.1, seen=PROPOSE_FROM)
    assert isinstance(action, Propose)
    assert (action.value, {*action.votes}) == (tally((0, 1, 2)), {0, 1, 2})


def test_half_of_the_votes_are_proposed_by_nobody() -> None:
    assert one(0, knows=(1,)).at(1.5) == []


def test_a_later_proposer_waits_for_the_statuses() -> None:
    """Another elector may be locked, which its status shows."""
    elector = one(1)
    elector.at(0, slot=1)
    assert elector.wanted(0.5, slot=1)["status"] == [0, 2, 3, 4]
    assert elector.at(0.9, slot=1) == []
    lock = proof_of(0, LESS, (0, 2, 3))
    elector.read(CheckedStatus(2, 1, {}, lock))
    assert elector.wanted(0.9, slot=1)["status"] == [0, 3, 4]
    assert elector.at(PROPOSE_FROM, slot=1) == [Propose(1, LESS, {}, lock)]


@pytest.mark.parametrize("slot", [0, 1])
def test_nothing_is_proposed_that_nobody_could_echo_in_time(slot: int) -> None:
    elector = one(slot, knows=(2, 3, 4))
    if slot:
        elector.at(0, slot=slot)
    assert elector.at(PROPOSE_UNTIL + 0.1, slot=slot) == []


def test_the_electors_take_turns() -> None:
    assert [ELECTORS.proposer(slot) for slot in range(7)] == [0, 1, 2, 3, 4, 0, 1]


# Echoes


def test_one_of_two_proposals_is_echoed_by_nobody() -> None:
    elector = one(4).read(proposal(0, BOTH, EVERYBODY), repeated(1, proposal(0, VOID)))
    assert elector.at(1.5) == []
    assert elector.election.equivocators == {0}


def test_from_two_delta_on_an_elector_echoes_only_if_its_round_has_read_all_relays() -> None:
    """A round that began before reads only the proposer's, and may end later."""
    elector = one(3)
    assert elector.wanted(PROPOSE_UNTIL - 0.1)["relay"] == [0]
    assert elector.wanted(PROPOSE_UNTIL)["relay"] == [0, 1, 2, 4]
    elector.read(proposal(0, BOTH, EVERYBODY))
    assert elector.at(PROPOSE_UNTIL, seen=PROPOSE_UNTIL - 0.1) == []
    assert [type(action) for action in elector.at(PROPOSE_UNTIL + 0.1, seen=PROPOSE_UNTIL)] == [Repeat]


def test_an_elector_echoes_once_in_a_slot() -> None:
    elector = one(4).read(proposal(0, BOTH, EVERYBODY))
    assert [type(action) for action in elector.at(0.5)] == [Repeat]
    assert elector.read(*echoes(0, VOID, (1,))).at(1.0) == []


def test_what_comes_after_the_bound_is_not_echoed() -> None:
    """No elector could be committed to it in this slot."""
    elector = one(4).read(proposal(0, BOTH, EVERYBODY))
    assert elector.at(ECHO_UNTIL + 0.1) == []
    assert elector.wanted(ECHO_UNTIL) == {}


def test_what_was_read_before_a_slot_began_starts_nothing_in_it() -> None:
    """A decision may have been published since: an elector enters a slot when it has looked for it."""
    elector = one(4)
    assert elector.at(0.1, seen=-0.1, slot=1) == []
    assert [type(action) for action in elector.at(0.2, seen=0.1, slot=1)] == [SendStatus]


# Commitments


def echoed(at: float = 0.5) -> One:
    """An elector that has echoed a proposal of the first slot."""
    elector = one(4).read(proposal(0, BOTH, EVERYBODY))
    assert [type(action) for action in elector.at(at)] == [Repeat]
    return elector


@pytest.mark.parametrize(("echo", "due"), [(0.5, 3.0), (1.0, 3.0), (1.5, 3.5)])
def test_an_elector_commits_two_delta_after_its_echo_and_not_before_three(echo: float, due: float) -> None:
    """Until then another elector may have echoed another proposal.

    Until two Delta it reads only the proposer's relay, and a further Delta passes until its echo has been read.
    """
    elector = echoed(echo).read(*echoes(0, BOTH, (1, 2)))
    assert due == max(echo + COMMIT_AFTER, COMMIT_FROM)
    assert COMMIT_AFTER == 2  # Delta until the others have read the echo, and Delta until it has read theirs
    assert elector.at(due - 0.1) == elector.at(due + 0.1, seen=due - 0.1) == []
    (action,) = elector.at(due)
    assert isinstance(action, Commit)
    assert (action.proof.value, sorted(action.proof.echoes)) == (BOTH, [0, 1, 2, 4])
    assert {*action.votes} == {*EVERYBODY}
    assert elector.at(due + 0.2) == []


def test_if_all_have_echoed_nobody_waits() -> None:
    assert [type(action) for action in echoed().read(*echoes(0, BOTH, (1, 2, 3))).at(0.7)] == [Commit]


WITHOUT: dict[str, list[CheckedRelay]] = {
    "echoes of more than half": echoes(0, BOTH, (0,)),
    "a second proposal": [*echoes(0, BOTH, (0, 1, 2)), *echoes(0, VOID, (3,))],
    "a second proposal by all": [*echoes(0, BOTH, (0, 1, 2, 3)), *echoes(0, VOID, (3,))],
    "echoes of its value": [*echoes(0, VOID, (0, 1, 2))],
}


@pytest.mark.parametrize("without", WITHOUT)
def test_nobody_commits(without: str) -> None:
    elector = echoed().read(*WITHOUT[without])
    assert elector.at(3.0) == elector.at(COMMIT_UNTIL) == []


def test_who_has_echoed_nothing_commits_to_nothing() -> None:
    elector = one(4).read(*echoes(0, VOID, (0, 1, 2, 3)))
    assert elector.at(3.5) == elector.at(COMMIT_UNTIL) == []


def test_who_could_not_publish_its_echo_commits_to_nothing() -> None:
    """The others have not read it: they may have echoed something else."""
    elector = one(4).read(proposal(0, BOTH, EVERYBODY))
    elector.fails = True
    assert [type(action) for action in elector.at(0.5)] == [Repeat]
    assert elector.read(*echoes(0, BOTH, (1, 2, 3))).at(3.0) == []


def test_nobody_commits_so_late_that_others_could_enter_the_next_slot_without_knowing() -> None:
    elector = echoed(2.9)
    assert elector.at(COMMIT_UNTIL) == []
    assert elector.wanted(COMMIT_UNTIL) == {}
    elector.read(*echoes(0, BOTH, (1, 2, 3)))  # it was requested before, and arrives now
    assert elector.at(COMMIT_UNTIL + 0.1) == []
    assert SLOT == COMMIT_UNTIL + 1


def test_a_commitment_that_could_not_be_published_is_made_again() -> None:
    elector = echoed().read(*echoes(0, BOTH, (1, 2)))
    elector.fails = True
    assert [type(action) for action in elector.at(3.0)] == [Commit]
    elector.election.unpublished()
    assert [type(action) for action in elector.at(3.2)] == [Commit]


def test_what_more_than_half_are_committed_to_is_decided_and_adopted() -> None:
    elector, proof = one(4), proof_of(0, BOTH, (0, 1, 2))
    elector.read(decision_of(0, proof), decision_of(1, proof))
    assert (elector.election.decided, elector.at(1.0)) == (None, [])
    elector.read(decision_of(2, proof))
    assert elector.election.decided == proof
    assert not elector.election.finished
    (action,) = elector.at(1.2)
    assert isinstance(action, Commit)
    assert (action.proof, {*action.commitments}) == (proof, {0, 1, 2})
    assert elector.election.finished


def test_an_elector_goes_on_until_its_own_decision_can_be_read_with_a_majority() -> None:
    elector = echoed().read(*echoes(0, BOTH, (1, 2)))
    (action,) = elector.at(3.0)
    assert isinstance(action, Commit)
    assert not elector.election.finished
    elector.read(decision_of(0, action.proof, (1, 2)))  # it is not among these electors
    assert (elector.election.decided, elector.election.finished) == (action.proof, False)
    assert [type(action) for action in elector.at(3.5)] == [Commit]
    assert elector.election.finished


def test_a_majority_that_no_single_decision_shows_is_published() -> None:
    elector = echoed().read(*echoes(0, BOTH, (1, 2)))
    (action,) = elector.at(3.0)
    assert isinstance(action, Commit)
    elector.read(decision_of(0, action.proof), decision_of(1, action.proof, (4,)))
    assert (elector.election.decided, elector.election.finished) == (action.proof, False)
    (again,) = elector.at(3.5)
    assert isinstance(again, Commit)
    assert {*again.commitments} == {0, 1, 4}


def test_who_is_shown_in_anothers_decision_need_not_write_its_own_again() -> None:
    elector = echoed().read(*echoes(0, BOTH, (1, 2)))
    (action,) = elector.at(3.0)
    assert isinstance(action, Commit)
    elector.read(decision_of(0, action.proof, (1, 4)))
    assert elector.election.finished


def test_nobody_commits_twice() -> None:
    """More than half of the stake lies: this elector's commitment does not change."""
    elector = echoed().read(*echoes(0, BOTH, (1, 2)))
    elector.at(3.0)
    other = proof_of(1, VOID, (0, 1, 2))
    elector.read(*(decision_of(uid, other) for uid in (0, 1, 2)))
    assert elector.at(4.0) == []
    assert elector.election.finished


# Restarts


def restarted(*documents: Checked) -> One:
    elector = one(4)
    for document in documents:
        Network.feed(elector.election, document, restored=True)
    return elector


def test_who_has_echoed_before_a_restart_echoes_nothing_else() -> None:
    elector = restarted(repeated(4, proposal(0, VOID)))
    elector.election.relay(proposal(0, VOID))
    assert elector.at(0.5) == []
    assert elector.wanted(0.5) == {"relay": [1, 2, 3]}


def test_after_a_restart_an_echo_counts_only_if_all_have_echoed() -> None:
    """It may have been published just now, and the others have two Delta to answer."""
    elector = restarted(repeated(4, proposal(0, BOTH, EVERYBODY))).read(*echoes(0, BOTH, (0, 1, 2)))
    assert elector.at(0.5) == elector.at(2.5) == elector.at(COMMIT_UNTIL) == []
    assert [type(action) for action in elector.read(*echoes(0, BOTH, (3,))).at(COMMIT_UNTIL)] == [Commit]


def test_who_is_committed_before_a_restart_stays_so() -> None:
    proof = proof_of(0, BOTH, (0, 1, 4))
    elector = restarted(decision_of(4, proof))
    assert elector.election.committed == proof
    elector.read(proposal(1, LESS, proof=proof_of(0, LESS, (0, 1, 2))), *echoes(1, LESS, (0, 2, 3)))
    elector.at(0.5, slot=1)
    assert [type(action) for action in elector.at(4.0, slot=1)] == []
    assert elector.election.committed == proof


# Votes that are known


@pytest.mark.parametrize("kind", ["relay", "status", "decision"])
def test_votes_that_a_ballot_embeds_are_known(kind: str) -> None:
    """The publisher of disputed updates must know whose vote disputes them; an elector that signs two votes is
    named."""
    elector, votes = one(4, knows=(0,)), {0: ballot(0, 101), **votes_of((1, 2))}
    shown = decision_of(1, proof_of(0, BOTH, (0, 1, 2)))
    documents: dict[str, Checked] = {
        "relay": proposed(0, 0, BOTH, votes),
        "status": CheckedStatus(1, 1, votes, None),
        "decision": type(shown)(1, shown.proof, votes, shown.commitments),
    }
    elector.read(documents[kind])
    assert sorted(elector.election.votes) == [0, 1, 2, 4]
    assert elector.election.votes[0] == VOTES[0]  # the first one stays
    assert elector.election.evidence == [(VOTES[0], votes[0])]
    assert elector.election.equivocators == {0}


# Requests: few if all is well, and everything in time if not


def test_who_waits_for_a_proposal_looks_for_it_alone() -> None:
    elector = one(4, knows=())
    assert elector.wanted(0.5) == {"relay": [0]}
    assert elector.wanted(PROPOSE_FROM) == {"relay": [0], "vote": [0, 1, 2, 3]}
    elector.at(PROPOSE_FROM)
    assert elector.wanted(1.5) == {"relay": [0]}
    assert elector.wanted(PROPOSE_UNTIL) == {"relay": [0, 1, 2, 3]}  # it may show its proposal to others alone


def test_the_proposer_looks_for_votes_and_then_for_echoes() -> None:
    elector = one(0, knows=(1,))
    assert elector.wanted(0.5) == {"vote": [2, 3, 4]}
    elector.read(*VOTES.values()).at(0.5)
    assert elector.wanted(0.6) == {"relay": [1, 2, 3, 4]}


def test_who_has_echoed_looks_for_the_others_echoes_until_nobody_can_commit() -> None:
    elector = echoed().read(*echoes(0, BOTH, (1,)))
    assert elector.wanted(1.0) == {"relay": [2, 3]}  # it has read the proposer's, and no relay is read again
    assert elector.wanted(COMMIT_UNTIL - 0.1) == {"relay": [2, 3]}


def test_who_is_committed_looks_for_the_others_decisions_and_not_at_once() -> None:
    elector = echoed().read(*echoes(0, BOTH, (1, 2, 3)))
    elector.at(0.7)
    look = 0.7 + DECISION_POLL_SECONDS / DELTA
    assert elector.wanted(look - 0.01) == {}
    assert elector.wanted(look + 0.01) == {"decision": [0, 1, 2, 3]}
    elector.at(look + 0.01)
    assert elector.wanted(look + 0.5) == {}
    assert elector.wanted(look + 1.1) == {"decision": [0, 1, 2, 3]}


def test_who_comes_into_a_slot_late_looks_for_decisions_before_it_says_anything() -> None:
    elector = one(4).read(proposal(1, BOTH, EVERYBODY))
    assert elector.wanted(PROPOSE_UNTIL + 0.5, slot=1)["decision"] == [0, 1, 2, 3]
    elector.at(PROPOSE_UNTIL + 0.6, seen=PROPOSE_UNTIL + 0.5, slot=1)
    assert "decision" not in elector.wanted(PROPOSE_UNTIL + 0.7, slot=1)


def test_a_slot_begins_with_the_decisions_of_the_last_one() -> None:
    elector = one(4)
    assert elector.wanted(0.0, slot=1)["decision"] == [0, 1, 2, 3]
    elector.read(decision_of(2, proof_of(0, BOTH, (0, 1, 2)))).at(0.0, slot=1)
    assert elector.wanted(0.1, slot=1) == {"decision": [0, 1, 3], "relay": [1]}
    assert elector.wanted(PROPOSE_UNTIL, slot=1) == {"relay": [0, 1, 2, 3]}


# Scripted attacks on agreement


@dataclass
class Scripted(Network):
    """Each document of a hostile elector is shown to the readers that the script names, from a time on.

    Attributes:
        script: by kind, author, slot and reader.
    """

    script: dict[tuple[str, int, int, int], tuple[float, Callable[[], Checked]]] = field(default_factory=dict)

    def _shown(self, wanted: Wanted, reader: int, now: float) -> Checked | None:
        since, make = self.script.get((wanted.kind, wanted.uid, wanted.slot, reader), (float("inf"), None))
        return make() if make and since <= now else None

    def show(self, kind: str, uid: int, slot: int, readers: Iterable[int], at: float, make: Callable[[], Checked]):
        """``at``: in Delta, from the slot's beginning."""
        for reader in readers:
            self.script[kind, uid, slot, reader] = ((slot * SLOT + at) * DELTA, make)

    def tallied(self, votes: dict[int, Signed[Vote]]) -> Value:
        value = self.question.tally({uid: one.document for uid, one in votes.items()}, self.electors, 0)
        assert value is not None
        return value

    def values_committed(self) -> list[list[int]]:
        values = {proof.id: proof.value for proof in self.committed.values()}
        return [[one.uid for one in value.included.included] for value in values.values()]


def scripted(stakes: dict[int, int], hostile: set[int], finder: int) -> Scripted:
    """Return a network in which ``finder`` and, if they choose, the hostile electors have found the update of 103."""
    network = Scripted(stakes, frozenset(hostile), seed=1, played=(103,), delays=(DELTA,))
    everybody = (*network.miners, 103)
    for uid in stakes:
        found = dict.fromkeys(network.miners, 0)
        more = [signed(vote({**found, 103: 0}, everybody), uid), signed(vote(found, everybody), uid)]
        network.votes[uid] = more if uid in hostile or uid == finder else more[1:]
    return network


def test_what_one_elector_was_made_to_commit_to_is_what_all_commit_to() -> None:
    """The proposal reaches only 2, as late as possible: 2 commits last, with the hostile echoes that are shown only to
    it.

    The next proposer has another value, which is equally good for all electors that do not know of that commitment.
    """
    network = scripted({0: 21, 1: 20, 2: 20, 3: 20, 4: 19}, hostile={0, 1}, finder=2)
    first = {uid: votes[0] for uid, votes in network.votes.items()}
    second = {**first, 0: network.votes[0][1], 1: network.votes[1][1]}
    late = proposed(0, 0, network.tallied(first), first)
    other = proposed(1, 1, network.tallied(second), second)
    assert late.id != other.id
    network.show("relay", 0, 0, [2], ECHO_UNTIL - 0.4, lambda: late)
    network.show("relay", 1, 0, [2], COMMIT_UNTIL - 0.5, lambda: repeated(1, late))
    network.show("relay", 1, 1, [3, 4], PROPOSE_FROM, lambda: other)
    network.show("relay", 0, 1, [3, 4], PROPOSE_FROM, lambda: repeated(0, other))
    network.run(slots=5)
    assert network.committed_at[2] < BEGINS
    assert network.values_committed() == [[*network.miners, 103]]
    assert network.committed.keys() == {2, 3, 4}


def test_a_proof_that_was_kept_back_does_not_undo_a_later_decision() -> None:
    """Slot 0: 3 echoes a value and sees a second proposal: no elector commits, but the hostile ones have a proof of it.

    Slot 1: 4 commits to another value. Slot 2: the proof is shown, to 5 already before the decision of 4.
    """
    network = scripted({0: 17, 1: 16, 2: 15, 3: 13, 4: 13, 5: 13, 6: 13}, hostile={0, 1, 2}, finder=3)
    first = {uid: votes[0] for uid, votes in network.votes.items()}
    second = first | {uid: network.votes[uid][1] for uid in (0, 1, 2)}
    kept, twin = proposed(0, 0, network.tallied(first), first), proposed(0, 0, network.tallied(second), second)
    network.show("relay", 0, 0, [3], ECHO_UNTIL - 0.4, lambda: kept)
    network.show("relay", 1, 0, [3], ECHO_UNTIL + 0.4, lambda: repeated(1, twin))
    proof = proof_of(0, kept.value, (0, 1, 2, 3))
    network.show("decision", 0, 1, [5], 0.6, lambda: decision_of(0, proof, (1, 2)))
    new = proposed(1, 1, twin.value, second)
    network.show("relay", 1, 1, [4], ECHO_UNTIL - 0.4, lambda: new)
    for uid in (0, 2):
        network.show("relay", uid, 1, [4], ECHO_UNTIL, lambda uid=uid: repeated(uid, new))
    again = proposed(2, 2, kept.value, proof=proof)
    network.show("relay", 2, 2, [3, 5, 6], PROPOSE_FROM, lambda: again)
    for uid in (0, 1):
        network.show("relay", uid, 2, [3, 5, 6], PROPOSE_FROM, lambda uid=uid: repeated(uid, again))
    network.run(slots=7)
    assert kept.id in {identity for slot, identity in network.echoes if slot == 0}  # the proof is valid
    assert BEGINS < network.committed_at[4] < 2 * BEGINS
    assert network.values_committed() == [[*network.miners]]
    assert network.committed.keys() == {3, 4, 5, 6}


def test_votes_of_one_half_shown_early_leave_no_honest_update_out() -> None:
    """0 proposes at once, from the hostile votes and that of 2, and shows it to 2 before it could read the others'."""
    network = scripted({0: 25, 1: 24, 2: 17, 3: 17, 4: 17}, hostile={0, 1}, finder=2)
    empty = {uid: signed(vote({}, (100,)), uid) for uid in (0, 1)}
    votes = {**empty, 2: network.votes[2][0]}
    false = proposed(0, 0, network.tallied(votes), votes)
    network.show("relay", 0, 0, [2, 3, 4], 0.0, lambda: false)
    network.show("relay", 1, 0, [2, 3, 4], 0.0, lambda: repeated(1, false))
    network.run(slots=5)
    assert network.values_committed() == [[*network.miners]]


def test_a_miner_that_one_honest_elector_knows_is_not_included() -> None:
    """The minimum: a hash needs hostile votes of just under half of the stake and one honest vote; these suffice."""
    for stake, included in ((2, [100]), (1, [])):
        electors = Electors((Elector(0, "key-0", 49), Elector(1, "key-1", stake), Elector(2, "key-2", 51 - stake)))
        lies = {0: vote({100: 7}, ()), 1: vote({100: 7}, ()), 2: vote({}, ())}
        value = question((100,), void_from=9).tally(lies, electors, 0)
        assert value
        assert [(one.uid, one.sha256) for one in value.included.included] == [(uid, sha(uid, 7)) for uid in included]
