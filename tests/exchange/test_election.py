"""Electors in simulated time, with an adversary: agreement, progress, and no honest peer left out.

``test_election_rules.py`` tests each single rule.
"""

import pytest
from elections import (
    AT_ONCE,
    DELTA,
    LONG_ROUNDS,
    WINDOW,
    Network,
    proposed,
    question,
    repeated,
    sha,
    signed,
    vote,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.chain.electors import Elector, Electors
from tplr.exchange.election import Election
from tplr.exchange.quorum import void


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Electors of which the adversary holds as much stake as possible below one half."""
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
        rounds=draw(st.sampled_from((AT_ONCE, LONG_ROUNDS))),
    )


@st.composite
def halves(draw: st.DrawFn) -> Network:
    """Electors of which the adversary holds exactly half of the stake, with one or two electors."""
    honest = draw(st.lists(st.integers(2, 50), min_size=1, max_size=3))
    one = draw(st.integers(1, sum(honest) - 1))
    hostile = draw(st.sampled_from(([sum(honest)], [one, sum(honest) - one])))
    order = draw(st.permutations(range(len(honest) + len(hostile))))
    stakes = dict(zip(order, [*honest, *hostile], strict=True))
    return Network(
        dict(sorted(stakes.items())),
        frozenset(order[len(honest) :]),
        draw(st.integers(0, 2**32)),
        chaos=draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0))),
        delays=draw(st.sampled_from(((0.0,), (DELTA,), (0.0, DELTA), (0.0, 1.0, DELTA)))),
        rounds=draw(st.sampled_from((AT_ONCE, LONG_ROUNDS))),
    )


def check(network: Network) -> None:
    """Check all statements in the docstring of ``exchange/election.py``."""
    check_slots(network)
    assert network.committed.keys() == set(network.honest), "not all have committed"
    values = {proof.id: proof.value for proof in network.committed.values()}
    assert len(values) == 1, f"{len(values)} values"
    (value,) = values.values()
    included = {one.uid: one.sha256 for one in value.included.included}
    assert all(included.get(miner) == sha(miner) for miner in network.miners), f"left out: {included}"
    known = [network.votes[uid][0].document.found for uid in network.honest]
    assert all(any(found.get(str(uid)) == sha256 for found in known) for uid, sha256 in included.items())


def check_slots(network: Network) -> None:
    """Check that in a slot in which an honest elector commits by its echoes, no honest one echoes another value."""
    for proof in network.by_echoes:
        others = [by for (slot, value), by in network.echoes.items() if slot == proof.slot and value != proof.id]
        assert not {uid for by in others for uid in by} - network.hostile, f"slot {proof.slot}: another value"


@settings(max_examples=200)
@given(networks())
def test_the_honest_agree_in_as_many_slots_as_there_are_electors(network: Network) -> None:
    spare = network.rounds != AT_ONCE  # a slot in which actions may be late
    network.run(slots=len(network.stakes) + spare)
    check(network)


@settings(max_examples=200)
@given(halves())
def test_with_half_of_the_stake_the_adversary_may_stop_a_decision_but_not_split_it(network: Network) -> None:
    network.run(slots=len(network.stakes))
    check_slots(network)
    assert len({proof.id for proof in network.committed.values()}) <= 1


@pytest.mark.parametrize("rounds", [AT_ONCE, LONG_ROUNDS], ids=["at once", "long rounds"])
def test_beside_half_of_the_stake_and_in_long_rounds_electors_decide_at_times(rounds: tuple[float, ...]) -> None:
    """Otherwise the tests above would show nothing."""
    stakes, seeds = {0: 4, 1: 3, 2: 7}, range(20)
    networks = [Network(stakes, frozenset({2}), seed, chaos=0.9, rounds=rounds) for seed in seeds]
    for network in networks:
        network.run(slots=3)
    assert any(network.by_echoes for network in networks)


@pytest.mark.parametrize("rounds", [AT_ONCE, LONG_ROUNDS], ids=["at once", "long rounds"])
def test_who_shows_each_another_proposal_early_in_a_slot_splits_nobody(rounds: tuple[float, ...]) -> None:
    """An attack in which one elector echoed a second proposal, and another had committed to the first by then.

    Before two Delta of a slot an elector does not read the others' relays.
    """
    network = Network(
        dict(enumerate((9, 11, 4, 23))), frozenset({3}), 1199, chaos=1.0, delays=(0.0, 1.0, DELTA), rounds=rounds
    )
    network.run(slots=4)
    check(network)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_if_all_is_well_the_first_slot_decides(count: int) -> None:
    network = Network({uid: 100 - uid for uid in range(count)}, frozenset(), seed=1)
    network.run(slots=1)
    check(network)
    assert {proof.slot for proof in network.committed.values()} == {0}


def test_alone_an_elector_commits_at_once() -> None:
    network = Network({0: 5}, frozenset(), seed=1)
    network._round(0, 0.0, 0.0)
    assert not network.committed  # it has not voted
    network.nodes[0].vote(network.votes[0][0])
    network._round(0, 0.0, 0.0)
    assert (network.committed_at, network.requests) == ({0: 0.0}, 0)


def test_the_silent_stop_nobody() -> None:
    network = Network({0: 40, 1: 30, 2: 30}, frozenset({0}), seed=1, chaos=0.0)
    network.run(slots=2)
    check(network)
    assert {proof.slot for proof in network.committed.values()} == {1}


def test_more_than_half_of_the_stake_can_decide_what_it_wants() -> None:
    """The bound: the same adversary with 52 % of the stake."""
    seen = set()
    for seed in range(200):
        network = Network({0: 52, 1: 24, 2: 24}, frozenset({0}), seed=seed, chaos=0.9)
        network.run(slots=3)
        values = {proof.id: proof.value for proof in network.committed.values()}
        left_out = any(len(value.included.included) < len(network.miners) for value in values.values())
        seen |= {"two values"} if len(values) > 1 else set()
        seen |= {"an honest update left out"} if left_out else set()
    assert seen == {"two values", "an honest update left out"}


def test_a_vote_that_is_shown_to_one_elector_costs_one_slot() -> None:
    """0 proposes; 3, which is hostile, shows its vote only to 1, which demands an update that 0 can't support."""
    network = Network({0: 20, 1: 19, 2: 16, 3: 45}, frozenset({3}), seed=1, chaos=0.0, played=(103,))
    network.votes[1] = [signed(vote(dict.fromkeys((*network.miners, 103), 0), ()), 1)]
    network.votes[0] = [signed(vote(dict.fromkeys(network.miners, 0), ()), 0)]
    network.votes[2] = [signed(vote(dict.fromkeys(network.miners, 0), ()), 2)]
    network.votes[3] = [signed(vote({103: 0}, ()), 3)]
    network.nodes[1].vote(network.votes[3][0])
    network.run(slots=3)
    check(network)
    (value,) = {proof.id: proof.value for proof in network.committed.values()}.values()
    # The proposers: 3, which is silent; 0, which knows the vote by now, because 1 has published it.
    assert {proof.slot for proof in network.committed.values()} == {1}
    assert [one.uid for one in value.included.included] == [*network.miners, 103]


def test_who_signs_two_ballots_is_named_and_nobody_else() -> None:
    electors = Electors(tuple(Elector(uid, f"key-{uid}", 10 - uid) for uid in range(4)))
    election = Election(electors, 3, question((100,), void_from=9), DELTA)
    one, other = void(WINDOW, "1"), void(WINDOW, "1").model_copy(update={"peers": question((7,), 9).listed})
    for uid in range(3):
        election.vote(signed(vote({100: 0}, (100,)), uid))
        election.relay(repeated(uid, proposed(0, 0, one)))
    assert election.equivocators == set()
    election.vote(signed(vote({100: 1}, (100,)), 2))
    assert election.equivocators == {2}
    election.relay(repeated(1, proposed(0, 0, other)))  # an honest elector repeats it: its proposer signed both
    assert election.equivocators == {0, 2}
