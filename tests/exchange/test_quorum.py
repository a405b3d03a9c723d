"""Pure decisions: the same votes give the same value on every node, in any order."""

from hypothesis import given
from hypothesis import strategies as st

from tplr.chain.electors import Elector, Electors
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.ballots import Vote, value_id
from tplr.exchange.quorum import StartQuestion, WindowQuestion, majority, supported, tally_peers, void
from tplr.schemas import PeerList, Reason

ELECTORS = Electors((Elector(0, "a", 40), Elector(1, "b", 35), Elector(2, "c", 25)))


def sha(number: int) -> str:
    return f"{number:064x}"


def wish(peers=(), reserve=(), probation=()) -> PeerList:
    return PeerList(
        peers=peers,
        reserve_peers=reserve,
        probation=probation,
        initial_selection=False,
        sync_window=0,
        first_effective_window=0,
    )


def vote(found: dict[int, int] | None = None, missing: dict[int, Reason] | None = None, peers=None) -> Vote:
    return Vote(
        found={str(uid): sha(number) for uid, number in (found or {}).items()},
        missing={str(uid): why for uid, why in (missing or {}).items()},
        peers=peers,
    )


def question(peers=(10, 11, 12), reserve=(13, 14), **changes) -> WindowQuestion:
    return WindowQuestion(
        **{
            "window": 7,
            "version": "1",
            "listed": wish(peers, reserve),
            "size": 100,
            "at_most": 2,
            "effective": 10,
            "lists_until": 1,
            "void_from": 3,
        }
        | changes
    )


def included(votes: dict[int, Vote], **changes) -> IncludedSet:
    value = question(**changes).tally(votes, ELECTORS, 0)
    assert value is not None
    return value.included


def test_a_hash_needs_more_than_half_of_all_stake() -> None:
    votes = {0: vote({10: 1, 11: 1}), 1: vote({10: 1, 11: 2}), 2: vote({11: 2, 12: 3})}
    assert supported(votes, ELECTORS) == {10: sha(1), 11: sha(2)}
    # An elector that has not voted counts as a vote against: half of the voters are not half of the stake.
    assert supported({0: vote({10: 1})}, ELECTORS) == {}


def test_an_earlier_window_is_voided_if_more_than_half_of_the_stake_has_lost_it() -> None:
    lost = [vote().model_copy(update={"lost": windows}) for windows in ((3, 4, 6), (4, 5, 7), (4, 6))]
    value = question().tally(dict(enumerate(lost)), ELECTORS, 0)
    assert value is not None
    # Window 3 is too long ago, 7 is the one that is decided.
    assert value.voided == (4, 6)
    value = question().tally({0: lost[0], 1: lost[1]}, ELECTORS, 0)
    assert value is not None
    assert value.voided == (4,)
    last = question().tally(dict(enumerate(lost)), ELECTORS, 3)
    assert last == void(7, "1")


def test_the_reserve_replaces_missing_peers_in_its_order() -> None:
    both = vote({10: 1, 12: 3, 13: 4, 14: 5}, {11: Reason.TOO_LATE})
    found = included({0: both, 1: both}, reserve=(14, 13))
    assert [one.uid for one in found.included] == [10, 12, 14]
    assert (found.skipped, found.success_rate) == ({"11": Reason.TOO_LATE}, 0.75)
    assert {one.size for one in found.included} == {100}


def test_the_reason_with_the_most_stake_is_given() -> None:
    missing = {10: Reason.MISSING, 13: Reason.MISSING, 14: Reason.MISSING}
    others = {10: Reason.UNAVAILABLE, 13: Reason.EXCLUDED, 14: Reason.UNAVAILABLE}
    votes = {0: vote({11: 1}, missing), 1: vote({11: 2}, others), 2: vote({12: 3, 11: 3}, others)}
    # 11: all electors have found different updates. 13: excluded reserve peers are named, others are not.
    expected = {"10": Reason.UNAVAILABLE, "11": Reason.UNAVAILABLE, "12": Reason.UNAVAILABLE, "13": Reason.EXCLUDED}
    assert included(votes).skipped == expected


def test_too_few_votes_decide_nothing_and_late_slots_a_void_window() -> None:
    assert question().tally({0: vote()}, ELECTORS, 0) is None
    assert question().tally({}, ELECTORS, 3) == void(7, "1")
    assert void(7, "1").included.included == ()


def test_a_peer_list_is_what_more_than_half_of_the_stake_names() -> None:
    votes = {
        0: vote(peers=wish((1, 2), (3,), (9,))),
        1: vote(peers=wish((2, 4), (1, 3), ())),
        2: vote(peers=wish((4, 5), (), (1, 3, 9))),
    }
    found = tally_peers(votes, ELECTORS, question())
    assert found is not None
    # As a peer: 2 by 75, 4 by 60; 1 by 40 only, so it is in the reserve, as is 3. 5 is named by 25. 9: on probation.
    assert (found.peers, found.reserve_peers, found.probation) == ((2, 4), (1, 3), (1, 3, 9))
    assert (found.sync_window, found.first_effective_window, found.initial_selection) == (7, 10, False)
    assert (more := tally_peers(votes, ELECTORS, question(at_most=9)))
    assert (more.peers, more.reserve_peers) == (found.peers, found.reserve_peers)
    # Peers above the most that a list may have are in the reserve, first by stake.
    fewer = tally_peers(votes, ELECTORS, question(at_most=1))
    assert fewer is not None
    assert (fewer.peers, fewer.reserve_peers) == ((2,), (4, 1, 3))


def test_no_list_follows_unless_more_than_half_wants_one_and_never_in_a_late_slot() -> None:
    votes = {0: vote(peers=wish((1,))), 1: vote(), 2: vote()}
    assert tally_peers(votes, ELECTORS, question()) is None
    all_want = dict.fromkeys(range(3), vote(peers=wish((1,))))
    first, second = (question().tally(all_want, ELECTORS, slot) for slot in (0, 1))
    assert first
    assert first.peers
    assert second
    assert (first.peers.peers, second.peers) == ((1,), None)


def test_the_start_is_a_list_and_the_window_from_which_it_counts() -> None:
    ask = StartQuestion(version="1", at_most=15, margin=2)
    want = vote(peers=wish((), (), (5, 6)))
    assert ask.tally({0: want, 1: vote()}, ELECTORS, 40) is None
    value = ask.tally({0: want, 1: want}, ELECTORS, 40)
    assert value
    assert value.peers
    assert (value.peers.first_effective_window, value.peers.probation, value.peers.initial_selection) == (
        42,
        (5, 6),
        True,
    )


def test_a_majority_says_the_same() -> None:
    assert majority({0: "x", 1: "y", 2: "y"}, ELECTORS) == "y"
    assert majority({0: "x", 1: "y"}, ELECTORS) is None
    assert majority({}, ELECTORS) is None


@given(st.permutations([0, 1, 2]), st.randoms(use_true_random=False))
def test_the_order_of_votes_changes_nothing(order: list[int], draw) -> None:
    votes = {
        uid: vote(
            {peer: draw.randrange(2) for peer in range(10, 15) if draw.random() < 0.7},
            {peer: draw.choice([*Reason]) for peer in range(10, 15)},
            wish(*(tuple(draw.sample(range(20), 3)) for _ in range(3))),
        )
        for uid in range(3)
    }
    one, other = (question().tally(some, ELECTORS, 0) for some in (votes, {uid: votes[uid] for uid in order}))
    assert one
    assert other
    assert value_id(one) == value_id(other)
