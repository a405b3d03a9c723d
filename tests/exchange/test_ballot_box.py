"""Ballots in buckets: each is on disk before it is published, published once, and unchanged after a restart."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tplr.chain import hotkeys
from tplr.chain.electors import Elector, Electors
from tplr.errors import StoreUnavailable
from tplr.exchange.ballot_box import Ballot, BallotBox, record_ballot
from tplr.exchange.ballots import (
    BallotReader,
    CheckedDecision,
    CheckedProof,
    CheckedRelay,
    Relay,
    Value,
    Vote,
    value_id,
)
from tplr.exchange.election import Commit, Election, Propose, Repeat, SendStatus, Wanted
from tplr.exchange.envelope import Run, Signed, Signer, envelope_cap
from tplr.exchange.quorum import WindowQuestion, void
from tplr.files import atomic_write
from tplr.keys import decision_key, echo_key, vote_key
from tplr.schemas import ObjectInfo, PeerList
from tplr.storage import MemoryStore

RUN, WINDOW = Run(3, "1"), 7
KEYS = [hotkeys.new_hotkey() for _ in range(3)]
ELECTORS = Electors(tuple(Elector(uid, KEYS[uid].ss58_address, 30 - uid) for uid in range(3)))
LISTED = PeerList(peers=(10,), initial_selection=False, sync_window=1, first_effective_window=3)
VALUE: Value = void(WINDOW, "1")
OTHER = VALUE.model_copy(update={"peers": LISTED})
VOTE, OTHER_VOTE = (Vote(found=found, missing={}, peers=None) for found in ({"10": "5e" * 32}, {}))


class Bucket(MemoryStore):
    """A bucket that fails as often as a test requires, and counts writes."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = 0
        self.written: list[str] = []
        self.most: dict[str, int] = {}  # bytes that a reader of each key fetches
        self.read: list[str] = []

    async def put(self, key: str, data: bytes, **options: Any) -> ObjectInfo:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("not now")
        info = await super().put(key, data, **options)
        self.written.append(key)
        return info

    async def get(self, key: str, *, max_bytes: int, **options: Any) -> bytes:
        self.most[key] = max_bytes
        self.read.append(key)
        return await super().get(key, max_bytes=max_bytes, **options)


@dataclass
class Seats:
    """Three electors, each with a bucket and a folder."""

    folder: Path
    buckets: list[Bucket]

    def box(self, uid: int, folder: str = "", seconds: float = 2.0) -> BallotBox:
        return BallotBox(
            subject=WINDOW,
            reader=BallotReader(ELECTORS, RUN, WINDOW),
            signer=Signer(RUN, uid, KEYS[uid].ss58_address, lambda message: hotkeys.sign(KEYS[uid], message)),
            own=self.buckets[uid],
            stores={other: bucket for other, bucket in enumerate(self.buckets) if other != uid},
            folder=self.folder / f"{uid}{folder}",
            seconds=seconds,
        )

    async def votes(self) -> dict[int, Signed[Vote]]:
        found = {}
        for uid in range(3):
            found[uid] = await self.box(uid).vote(VOTE)
        return found

    async def proof(self, value: Value = VALUE) -> CheckedProof:
        """Return the proof that two electors have echoed it."""
        first = await self.box(0).carry_out(Propose(0, value, await self.votes(), None))
        assert isinstance(first, CheckedRelay)
        second = await self.box(1).carry_out(Repeat(first))
        assert isinstance(second, CheckedRelay)
        return CheckedProof(0, value, value_id(value), {0: first.echo, 1: second.echo})


@pytest.fixture
def seats(tmp_path: Path) -> Seats:
    return Seats(tmp_path, [Bucket() for _ in range(3)])


def election(uid: int) -> Election:
    question = WindowQuestion(
        window=WINDOW, version="1", listed=LISTED, size=1, at_most=1, effective=9, lists_until=1, void_from=3
    )
    return Election(ELECTORS, uid, question, 1.0)


async def test_a_vote_is_stored_before_it_is_published_and_never_replaced(seats: Seats) -> None:
    seats.buckets[0].fails = 10**6
    with pytest.raises(StoreUnavailable):
        await seats.box(0, seconds=0.05).vote(VOTE)
    seats.buckets[0].fails = 0
    again = await seats.box(0).vote(OTHER_VOTE)  # its signed vote binds it
    assert isinstance(again, Signed)
    assert again.document == VOTE
    there = await seats.box(1).read(Wanted("vote", 0, 0))
    assert there == again


async def test_what_is_published_counts_if_the_disk_is_lost_and_is_stored_again(seats: Seats) -> None:
    first = await seats.box(0).vote(VOTE)
    for _ in range(2):
        assert await seats.box(0, "-new").vote(OTHER_VOTE) == first
        await seats.buckets[0].delete(vote_key(WINDOW, 0, "1"))  # afterwards it is on the new disk
    assert await seats.box(0, "-new").restore(election(0))
    assert await seats.box(1).read(Wanted("vote", 0, 0)) == first


async def test_a_bucket_that_fails_once_is_asked_again(seats: Seats) -> None:
    seats.buckets[0].fails = 1
    await seats.box(0).vote(VOTE)
    assert seats.buckets[0].written == [vote_key(WINDOW, 0, "1")]


async def test_a_restart_restores_everything_and_publishes_what_is_missing(seats: Seats) -> None:
    proof = await seats.proof()
    await seats.box(0).carry_out(SendStatus(1, await seats.votes(), proof))
    made = await seats.box(0).carry_out(Commit(proof, await seats.votes(), {}))
    bucket = seats.buckets[0]
    before = {info.key: await bucket.get(info.key, max_bytes=10**7) for info in await bucket.list()}
    assert len(before) == 4
    for key in before:
        await bucket.delete(key)
    again = election(0)
    assert await seats.box(0).restore(again)
    assert {info.key: await bucket.get(info.key, max_bytes=10**7) for info in await bucket.list()} == before
    assert isinstance(made, CheckedDecision)
    assert again.committed == made.proof
    assert sorted(again.votes) == [0, 1, 2]
    # It knows its own echo: it looks for the others' echoes, not for a proposal.
    fresh = election(1)
    assert await seats.box(1).restore(fresh)
    assert [one.uid for one in fresh.wanted(0.5) if one.kind == "relay"] == [0, 2]


async def test_a_restart_replaces_nothing_that_is_published(seats: Seats) -> None:
    await seats.box(0, "-old").vote(VOTE)
    path = seats.folder / "0" / "vote-0"
    path.parent.mkdir()
    bucket = Bucket()
    raw = await seats.buckets[0].get(vote_key(WINDOW, 0, "1"), max_bytes=10**6)
    other = Seats(seats.folder / "other", [bucket, *seats.buckets[1:]])
    await other.box(0).vote(OTHER_VOTE)
    path.write_bytes(await bucket.get(vote_key(WINDOW, 0, "1"), max_bytes=10**6))
    restored = election(0)
    assert await seats.box(0).restore(restored)
    assert await seats.buckets[0].get(vote_key(WINDOW, 0, "1"), max_bytes=10**6) == raw == path.read_bytes()
    assert restored.votes[0].document == VOTE  # the one that others have read


async def test_a_commitment_that_was_not_replaced_before_a_kill_is_replaced_after_the_restart(seats: Seats) -> None:
    """Else this node believes that its bucket proves the decision, and it never does."""
    proof = await seats.proof()
    first, second = [await seats.box(uid).carry_out(Commit(proof, {}, {})) for uid in (0, 1)]
    assert isinstance(first, CheckedDecision)
    assert isinstance(second, CheckedDecision)
    seats.buckets[0].fails = 10**6
    with pytest.raises(StoreUnavailable):  # stored on disk, as if it was killed during the request
        await seats.box(0, seconds=0.05).carry_out(Commit(proof, {}, {**first.commitments, **second.commitments}))
    seats.buckets[0].fails = 0
    again = election(0)
    assert await seats.box(0).restore(again)
    assert not again.finished
    record_ballot(again, second)
    (action,) = again.act(1.0, 1.0)
    record_ballot(again, await seats.box(0).carry_out(action))
    assert again.finished
    there = await seats.box(2).read(Wanted("decision", 0, 0))
    assert isinstance(there, CheckedDecision)
    assert sorted(there.commitments) == [0, 1]


async def test_a_damaged_file_and_others_are_left_out(seats: Seats) -> None:
    await seats.box(0).vote(VOTE)
    folder = seats.folder / "0"
    (folder / "relay-0").write_bytes(b"damaged")
    (folder / "relay-one").write_bytes(b"?")
    (folder / "other-0").write_bytes(b"?")
    assert await seats.box(0).restore(election(0))
    (folder / "vote-0").write_bytes(b"damaged")
    assert not await seats.box(0).restore(election(0))
    assert len(await seats.buckets[0].list()) == 1


async def test_a_file_of_an_earlier_run_is_logged_once(seats: Seats, caplog: pytest.LogCaptureFixture) -> None:
    """Each slot of the run's start has a box of its own, and restores the same folder."""
    folder = seats.folder / "0"
    folder.mkdir()
    left_out: set[Path] = set()
    for name in ("relay-0", "status-1"):
        (folder / name).write_bytes(b"of an earlier run")
    for _ in range(3):
        assert not await replace(seats.box(0), left_out=left_out).restore(election(0))
    for name in ("relay-0", "status-1"):
        assert caplog.text.count(f"{folder / name} not restored: ") == 1


async def test_a_stored_ballot_is_checked_once(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes a tenth of a second."""
    await seats.box(0).vote(VOTE)
    opened: list[Wanted] = []
    check = BallotBox._open

    def noted(box: BallotBox, raw: bytes, wanted: Wanted) -> Ballot:
        opened.append(wanted)
        return check(box, raw, wanted)

    monkeypatch.setattr(BallotBox, "_open", noted)
    for published in (True, False):
        if not published:
            await seats.buckets[0].delete(vote_key(WINDOW, 0, "1"))
        opened.clear()
        assert await seats.box(0).restore(election(0))
        assert len(opened) == 1
    for published in (True, False):
        if not published:
            await seats.buckets[0].delete(vote_key(WINDOW, 0, "1"))
        opened.clear()
        assert await seats.box(0).vote(OTHER_VOTE) == await seats.box(1).read(Wanted("vote", 0, 0))
        assert [one.uid for one in opened] == [0, 0]  # stored, and read by the other elector


async def test_what_is_no_ballot_of_this_election_does_not_bind(seats: Seats) -> None:
    other = replace(seats.box(0), signer=replace(seats.box(0).signer, run=replace(RUN, version="2")))
    for stale in (b"damaged", other._sign(OTHER_VOTE)):  # a folder that took part in another run
        path = seats.folder / "0" / "vote-0"
        await asyncio.to_thread(atomic_write, path, stale)
        assert not await seats.box(0).restore(election(0))
        first = await seats.box(0).vote(VOTE)
        assert isinstance(first, Signed)
        assert first.document == VOTE
        assert path.read_bytes() == first.raw
        assert await seats.box(1).read(Wanted("vote", 0, 0)) == first
        assert await seats.box(0).vote(OTHER_VOTE) == first  # now it is bound
        await seats.buckets[0].delete(vote_key(WINDOW, 0, "1"))


@pytest.mark.parametrize("stale", [b"damaged", b"x" * (2 * envelope_cap(Vote.max_bytes))])
async def test_an_object_in_the_bucket_that_is_no_ballot_is_replaced(stale: bytes, seats: Seats) -> None:
    await seats.buckets[0].put(vote_key(WINDOW, 0, "1"), stale)
    first = await seats.box(0).vote(VOTE)
    assert await seats.box(1).read(Wanted("vote", 0, 0)) == first
    assert await seats.box(0).vote(OTHER_VOTE) == first


async def test_without_a_vote_a_restart_says_so(seats: Seats) -> None:
    await seats.proof()
    (seats.folder / "1" / "vote-0").unlink()
    assert not await seats.box(1).restore(election(1))


async def test_an_elector_says_one_thing_in_a_slot(seats: Seats) -> None:
    await seats.proof()
    said = await seats.box(0).carry_out(Propose(0, OTHER, {}, None))
    assert isinstance(said, CheckedRelay)
    assert said.id == value_id(VALUE)
    there = await seats.box(1).read(Wanted("relay", 0, 0))
    assert there == said
    assert isinstance(there, CheckedRelay)
    assert sorted(there.votes) == [0, 1, 2]
    assert {int(uid): sha for uid, sha in there.proposal.document.votes.items()} == {
        uid: vote.sha256 for uid, vote in there.votes.items()
    }


async def test_a_commitment_binds_and_shows_more_later(seats: Seats) -> None:
    proof = await seats.proof()
    first = await seats.box(0).carry_out(Commit(proof, {}, {}))
    assert isinstance(first, CheckedDecision)
    # An elector that does not know its own document is bound by it.
    other = CheckedProof(0, OTHER, value_id(OTHER), proof.echoes)
    bound = await seats.box(0).carry_out(Commit(other, {}, {}))
    assert bound == first
    second = await seats.box(1).carry_out(Commit(proof, {}, {}))
    assert isinstance(second, CheckedDecision)
    known = {**first.commitments, **second.commitments}
    more = await seats.box(0).carry_out(Commit(proof, {}, known))
    assert isinstance(more, CheckedDecision)
    assert sorted(more.commitments) == [0, 1]
    there = await seats.box(2).read(Wanted("decision", 0, 0))
    assert there == more
    assert seats.buckets[0].written.count(decision_key(WINDOW, "1")) == 2


async def test_what_can_t_be_read_is_nothing(seats: Seats) -> None:
    box = seats.box(0)
    assert await box.read(Wanted("vote", 1, 0)) is None
    assert await box.read(Wanted("vote", 9, 0)) is None
    await seats.buckets[1].put(vote_key(WINDOW, 1, "1"), b"nonsense")
    assert await box.read(Wanted("vote", 1, 0)) is None
    await seats.buckets[1].put(echo_key(WINDOW, 0, 1, "1"), bytes(2 * Relay.max_bytes))
    assert await box.read(Wanted("relay", 1, 0)) is None
    caps = {vote_key(WINDOW, 1, "1"): Vote.max_bytes, echo_key(WINDOW, 0, 1, "1"): Relay.max_bytes}
    assert seats.buckets[1].most == {key: envelope_cap(size) for key, size in caps.items()}


async def test_a_ballot_that_is_not_valid_is_read_once_in_a_slot(seats: Seats) -> None:
    """Refusing one takes a tenth of a second, and many at once would delay the honest electors' ballots."""
    box, bucket = seats.box(1), seats.buckets[0]
    for slot, body in enumerate((b"not a ballot", b" " * (envelope_cap(Relay.max_bytes) + 1))):
        key = echo_key(WINDOW, slot, 0, "1")
        for _ in range(2):
            assert await box.read(Wanted("relay", 0, slot)) is None  # there may be one later
        await bucket.put(key, body)
        for _ in range(3):
            assert await box.read(Wanted("relay", 0, slot)) is None
        assert bucket.read.count(key) == 3
    assert await box.read(Wanted("vote", 0, 0)) is None
    await seats.box(0).vote(VOTE)
    assert await box.read(Wanted("vote", 0, 0)) is not None


async def test_nothing_is_left_when_an_election_is_over(seats: Seats) -> None:
    await seats.box(0).vote(VOTE)
    await seats.box(0).clear()
    assert not (seats.folder / "0").exists()
    await seats.box(0).clear()


async def test_a_ballot_is_fed_by_its_kind(seats: Seats) -> None:
    proof, fed = await seats.proof(), election(2)
    for wanted in (Wanted("vote", 0, 0), Wanted("relay", 0, 0)):
        ballot = await seats.box(2).read(wanted)
        assert ballot is not None
        record_ballot(fed, ballot)
    assert sorted(fed.votes) == [0, 1, 2]
    for uid in (0, 1):
        decision = await seats.box(uid).carry_out(Commit(proof, {}, {}))
        record_ballot(fed, decision)
    assert fed.decided is not None
    assert fed.decided.id == proof.id
