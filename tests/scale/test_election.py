"""Simulated elections take the same time and requests as over a real server (benchmarks/trust.md)."""

from collections.abc import Callable

import pytest

from tplr.chain.electors import Elector, Electors
from tplr.exchange.ballots import Vote
from tplr.exchange.quorum import WindowQuestion
from tplr.scale.election import Outcome, SimulatedElection
from tplr.schemas import PeerList

DELTA, REQUEST = 2.0, 0.05
APART = 1e-3  # seconds: electors of one process vote one after the other
MINERS = tuple(range(100, 120))


def run(
    count: int, quiet: tuple[int, ...] = (), late: float = 0.0, wait: Callable[[float], float] = lambda at: 0.0
) -> tuple[Electors, Outcome]:
    electors = Electors(tuple(Elector(uid, f"key-{uid}", 100 - uid) for uid in range(count)))
    listed = PeerList(peers=MINERS, reserve_peers=(), initial_selection=False, sync_window=1, first_effective_window=3)
    question = WindowQuestion(
        window=7, version="1", listed=listed, size=9, at_most=20, effective=10, lists_until=1, void_from=count
    )
    vote = Vote(found={str(uid): f"{uid:064x}" for uid in MINERS}, missing={}, peers=None)
    heard = {uid: REQUEST for uid in electors.uids if uid not in quiet}
    found = SimulatedElection(electors, question, window=7, delta=DELTA, request=heard, wait=wait)
    votes = {uid: (late if uid == count - 1 else APART * uid, vote) for uid in heard}
    return electors, found.run(votes, until=600.0)


@pytest.mark.parametrize(("count", "committed", "requests"), [(5, 1.7, 14), (20, 3.6, 46)])
def test_all_answer(count: int, committed: float, requests: int) -> None:
    electors, found = run(count)
    assert found.decided is not None
    assert [one.uid for one in found.decided.included.included] == list(MINERS)
    assert found.known(electors) <= max(found.committed.values()) <= 1.15 * committed
    mean = sum(found.requests.values()) / count
    assert 0.5 * requests <= mean <= 1.5 * requests


@pytest.mark.parametrize("count", [5, 20])
def test_a_silent_first_proposer_costs_its_slot(count: int) -> None:
    electors, found = run(count, quiet=(0,))
    assert found.decided is not None
    assert 6 * DELTA < found.known(electors) < 10.4 * DELTA  # measured: 19.4 and 20.8 s
    assert set(found.committed) == set(range(1, count))


def test_whoever_votes_late_is_waited_for_until_delta() -> None:
    electors, found = run(5, late=0.7 * DELTA)
    assert 0.7 * DELTA < found.known(electors) < 1.7 * DELTA


def test_requests_that_wait_delay_the_decision_while_they_do() -> None:
    (electors, alone), (_, after), (_, burst) = (
        run(5), run(5, wait=lambda at: 0.3 if at > 30 else 0.0), run(5, wait=lambda at: 0.3 if at < 1 else 0.0)
    )  # fmt: skip
    assert after.known(electors) == alone.known(electors)
    # Writing votes takes longer; in return the proposer's first round waits as well, and finds the others' votes.
    assert alone.known(electors) < burst.known(electors) < alone.known(electors) + 3 * 0.3


def test_the_same_twice() -> None:
    assert run(20) == run(20)


def test_without_more_than_half_of_the_stake_nothing_is_decided() -> None:
    electors, found = run(5, quiet=(0, 1, 2))
    assert found.decided is None
    assert found.known(electors) == float("inf")
