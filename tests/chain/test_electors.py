"""Electors are chosen by stake alone, in integers, with the same result on every node."""

from hypothesis import given
from hypothesis import strategies as st

from tplr.chain.base import Metagraph, Neuron
from tplr.chain.electors import Elector, Electors, electors_of

SHARE = 0.05


def neuron(uid: int, stake: float, *, permit: bool = True, hotkey: str = "") -> Neuron:
    return Neuron(uid, hotkey or f"key-{uid:03d}", "owner", stake, permit, 0)


def electors(*neurons: Neuron, buckets: set[int] | None = None, share: float = SHARE) -> Electors:
    return electors_of(Metagraph(8, neurons), {one.uid for one in neurons} if buckets is None else buckets, share)


def test_an_elector_has_a_permit_a_bucket_and_enough_stake() -> None:
    able = [neuron(0, 60.0), neuron(1, 30.0), neuron(2, 10.0), neuron(3, 1.0)]
    others = [neuron(4, 500.0, permit=False), neuron(5, 500.0), neuron(6, 0.0)]
    found = electors(*able, *others, buckets={0, 1, 2, 3, 4, 6})
    assert found.uids == (0, 1, 2)
    assert (found.total, found.hotkey(1)) == (100 * 10**9, "key-001")
    assert 3 not in found
    assert 2 in found


def test_many_equal_validators_leave_the_first_ones() -> None:
    found = electors(*(neuron(uid, 7.0) for uid in range(64)))
    assert found.uids == tuple(range(20))


def test_nobody_with_a_permit_means_nobody_decides() -> None:
    found = electors(neuron(0, 5.0, permit=False))
    assert found.uids == ()
    assert not found.outweighs([0])


def test_equal_stakes_are_ranked_by_hotkey() -> None:
    assert electors(neuron(1, 5.0, hotkey="b"), neuron(2, 5.0, hotkey="a"), neuron(3, 6.0)).uids == (3, 2, 1)


def test_half_is_not_enough_and_nobody_counts_twice() -> None:
    found = Electors((Elector(7, "a", 50), Elector(8, "b", 30), Elector(9, "c", 20)))
    assert not found.outweighs([7])
    assert not found.outweighs([8, 9, 9, 1000])
    assert found.outweighs([7, 9])
    assert [found.proposer(slot) for slot in range(5)] == [7, 8, 9, 7, 8]


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=100), st.floats(0.01, 1.0))
def test_the_largest_always_decides_and_never_more_than_the_share_allows(stakes: list[float], share: float) -> None:
    found = electors(*(neuron(uid, stake) for uid, stake in enumerate(stakes)), share=share)
    held = [round(stake * 10**9) for stake in stakes]
    assert len(found.ranked) <= 1 / round(share, 6)
    if any(held):
        assert found.ranked[0].stake == max(held)
