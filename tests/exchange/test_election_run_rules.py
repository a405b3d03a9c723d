"""The rules for running an election over buckets, each alone: scripted elections and boxes, no network."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from tplr.errors import StoreUnavailable
from tplr.exchange import election_run
from tplr.exchange.ballots import CheckedProof
from tplr.exchange.election import Commit, SendStatus, Wanted
from tplr.exchange.election_run import ElectionRun
from tplr.exchange.quorum import void

DELTA = 0.6
PROOF = CheckedProof(0, void(7, "1"), "id", {})


class Election:
    """Requests and publishes the documents of a script; ends after ``rounds``."""

    def __init__(self, rounds: int, *, wants: list[Wanted] | None = None, says: list[list[Any]] | None = None) -> None:
        self.committed: CheckedProof | None = None
        self.decided = None
        self.left = rounds
        self.wants = wants or []
        self.says = says or []
        self.unpublished_ = 0
        self.deadline = 10.0
        self.began: list[float] = []
        self.seen: list[float] = []

    @property
    def finished(self) -> bool:
        return self.left <= 0

    def wanted(self, now: float) -> list[Wanted]:
        self.left -= 1
        self.began.append(now)
        return self.wants

    def act(self, seen: float, now: float) -> list[Any]:
        self.seen.append(seen)
        return self.says.pop(0) if self.says else []

    def next_deadline(self, now: float) -> float:
        return now + self.deadline

    def unpublished(self) -> None:
        self.unpublished_ += 1


class Box:
    """Answers at scripted times, if at all; records the actions that were carried out."""

    def __init__(self, answer: Callable[[Wanted], float] = lambda _: 0.0, fails: int = 0) -> None:
        self.answer = answer
        self.fails = fails
        self.asked: list[Wanted] = []
        self.ended: list[Wanted] = []
        self.done: list[Any] = []

    async def read(self, wanted: Wanted) -> str:
        self.asked.append(wanted)
        try:
            await asyncio.sleep(self.answer(wanted))
        finally:
            self.ended.append(wanted)
        return f"ballot of {wanted.uid}"

    async def carry_out(self, action: Any) -> str:
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("not now")
        self.done.append(action)
        return f"own {type(action).__name__}"


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the documents that the election was given."""
    told: list[str] = []
    monkeypatch.setattr(election_run, "record_ballot", lambda _, ballot: told.append(ballot))
    return told


async def run(
    election: Election, box: Box, *, until: float = 10.0
) -> tuple[ElectionRun, bool, list[CheckedProof], float]:
    """Return the run, whether it finished, the committed value, and its duration."""
    clock, committed = asyncio.get_running_loop().time, []

    async def note(proof: CheckedProof) -> None:
        committed.append(proof)

    began = clock()
    made = ElectionRun(cast(Any, election), cast(Any, box), DELTA, opens=began)
    return made, await made.finish(until=until, committed=note), committed, clock() - began


def of(uid: int) -> Wanted:
    return Wanted("vote", uid, 0)


async def test_what_is_read_is_told_at_once(fed: list[str]) -> None:
    made, finished, _, took = await run(Election(1, wants=[of(1), of(2)]), Box())
    assert (finished, fed, made.requests) == (True, ["ballot of 1", "ballot of 2"], 2)
    assert took < 0.25 * DELTA  # a round ends when all have answered


async def test_a_slow_bucket_is_asked_once_at_a_time_and_not_waited_for_again(fed: list[str]) -> None:
    election, box = Election(3, wants=[of(1), of(2)]), Box(lambda wanted: 0.9 * DELTA if wanted.uid == 2 else 0.0)
    made, _, _, took = await run(election, box)
    assert [wanted.uid for wanted in box.asked] == [1, 2, 1, 1]
    # One round waits for it, the next ones do not; between rounds is a pause.
    assert took < 0.25 * DELTA * (1 + 2) + 0.15 * DELTA
    assert made.requests == 4
    assert len(box.ended) == len(box.asked)  # requests in flight end with the run


async def test_a_slow_bucket_that_answers_is_heard_and_waited_for_again(fed: list[str]) -> None:
    answers = iter([0.4 * DELTA, 0.2 * DELTA, 0.2 * DELTA, 0.2 * DELTA, 0.2 * DELTA])
    election = Election(3, wants=[of(1)])
    await run(election, Box(lambda _: next(answers)))
    assert fed == ["ballot of 1", "ballot of 1"]


async def test_a_request_is_given_up_after_delta(fed: list[str]) -> None:
    box = Box(lambda _: 3600.0)
    await run(Election(6, wants=[of(1)]), box)
    assert len(box.asked) == 2
    assert fed == []


async def test_nothing_counts_as_seen_that_was_published_while_it_read(fed: list[str]) -> None:
    election = Election(2, wants=[of(1)])
    await run(election, Box(lambda _: 0.1 * DELTA))
    assert election.seen == election.began


async def test_what_is_due_is_said_and_told_and_what_follows_from_it_too(fed: list[str]) -> None:
    status = SendStatus(1, {}, None)
    box = Box()
    await run(Election(1, says=[[status], [status, status]]), box)
    assert box.done == [status] * 3
    assert fed == ["own SendStatus"] * 3


async def test_a_commitment_that_fails_is_made_again_in_the_next_round(fed: list[str]) -> None:
    commit = Commit(PROOF, {}, {})
    election, box = Election(2, says=[[commit], [commit], []]), Box(fails=1)
    await run(election, box)
    assert (election.unpublished_, box.done) == (1, [commit])
    box = Box(fails=1)
    await run(Election(1, says=[[commit], [commit]]), box)
    assert box.done == []  # not in the same round, which has read nothing since


async def test_another_word_that_fails_is_not_repeated_here(fed: list[str]) -> None:
    status = SendStatus(1, {}, None)
    election, box = Election(1, says=[[status, status]]), Box(fails=1)
    await run(election, box)
    assert (election.unpublished_, box.done) == (0, [status])


async def test_a_commitment_is_told_once(fed: list[str]) -> None:
    election = Election(3)
    election.committed = PROOF
    _, _, committed, _ = await run(election, Box())
    assert committed == [PROOF]


async def test_it_ends_in_time_without_a_decision(fed: list[str]) -> None:
    _, finished, _, took = await run(Election(10**6), Box(), until=0.3)
    assert not finished
    assert 0.3 <= took < 0.3 + DELTA


async def test_a_round_begins_when_something_is_due(fed: list[str]) -> None:
    election = Election(4)
    election.deadline = 0.02 * DELTA
    _, _, _, took = await run(election, Box())
    assert took < 0.25 * DELTA
