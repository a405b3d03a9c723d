"""Electors over a real S3 server: requests, restarts, and electors that are silent, lie, hang or equivocate."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tplr.chain import hotkeys
from tplr.chain.electors import Elector, Electors
from tplr.exchange.agreed import DecisionReader
from tplr.exchange.ballot_box import BallotBox, record_ballot
from tplr.exchange.ballots import BallotReader, CheckedProof, CheckedRelay, Echo, Proposal, Relay, Value, Vote, value_id
from tplr.exchange.election import Election, Propose, Wanted
from tplr.exchange.election_run import ElectionRun
from tplr.exchange.envelope import Run, Signer, sign_document
from tplr.exchange.quorum import WindowQuestion, void
from tplr.keys import decision_key, echo_key, vote_key
from tplr.localnet.accounts import Account, key_table, new_account
from tplr.schemas import Document, PeerList, Reason
from tplr.storage import S3Connections
from tplr.testing.s3server import Delay, Rules, Server, serve

RUN, WINDOW = Run(3, "1"), 7
LISTED = PeerList(peers=(10, 11), reserve_peers=(), initial_selection=False, sync_window=1, first_effective_window=3)
FOUND = {"10": "5e" * 32, "11": "6f" * 32}


def question(void_from: int = 9) -> WindowQuestion:
    return WindowQuestion(
        window=WINDOW,
        version="1",
        listed=LISTED,
        size=100,
        at_most=20,
        effective=10,
        lists_until=1,
        void_from=void_from,
    )


def vote(found: Mapping[str, str] = FOUND) -> Vote:
    return Vote(found=dict(found), missing={uid: Reason.MISSING for uid in FOUND if uid not in found}, peers=None)


@dataclass
class Seat:
    """One elector: its keys, bucket and folder."""

    uid: int
    electors: Electors
    signer: Signer
    account: Account
    others: Mapping[int, Account]
    connections: S3Connections
    folder: Path
    delta: float
    committed: list[CheckedProof] = field(default_factory=list)

    def box(self, folder: Path | None = None) -> BallotBox:
        return BallotBox(
            subject=WINDOW,
            reader=BallotReader(self.electors, RUN, WINDOW),
            signer=self.signer,
            own=self.connections.store(self.account.writable),
            stores={uid: self.connections.store(other.readable) for uid, other in self.others.items()},
            folder=folder or self.folder,
            seconds=5.0,
        )

    def election(self, void_from: int = 9) -> Election:
        return Election(self.electors, self.uid, question(void_from), self.delta)

    async def take_part(self, opens: float, found: Mapping[str, str] = FOUND) -> ElectionRun:
        """Take part from the vote until the decision."""
        box, election = self.box(), self.election()
        if not await box.restore(election):
            record_ballot(election, await box.vote(vote(found)))
        run = ElectionRun(election, box, self.delta, opens)
        assert await run.finish(until=90.0, committed=self._note)
        return run

    async def _note(self, proof: CheckedProof) -> None:
        self.committed.append(proof)

    async def put(self, key: str, document: Document) -> None:
        raw = sign_document(document, window=WINDOW, signer=self.signer)
        await self.connections.store(self.account.writable).put(key, raw)


@dataclass
class Council:
    """All electors, by decreasing stake, on one server."""

    server: Server
    seats: list[Seat]
    requests: list[str]

    async def decide(self, uids: Iterable[int]) -> list[ElectionRun]:
        """Let these electors act honestly."""
        opens = asyncio.get_running_loop().time() + 0.3
        return await asyncio.gather(*(self.seats[uid].take_part(opens) for uid in uids))

    def values(self, uids: Iterable[int]) -> list[Value]:
        """Return the value of each elector; each is committed once."""
        assert {len(self.seats[uid].committed) for uid in uids} == {1}
        return [self.seats[uid].committed[0].value for uid in uids]


Opening = Callable[..., contextlib.AbstractAsyncContextManager[Council]]


@pytest.fixture
def council(tmp_path: Path) -> Opening:
    @contextlib.asynccontextmanager
    async def opened(count: int, delta: float = 0.4) -> AsyncIterator[Council]:
        keys = [hotkeys.new_hotkey() for _ in range(count)]
        ranked = tuple(Elector(uid, keys[uid].ss58_address, 100 - uid) for uid in range(count))
        accounts = [new_account() for _ in range(count)]
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serve(tmp_path / "s3", key_table(accounts), rules=Rules()))
            requests: list[str] = []
            take = server.faults.take

            def counted(method: str, target: str):
                requests.append(f"{method} {target}")
                return take(method, target)

            server.faults.take = counted  # pyright: ignore[reportAttributeAccessIssue]
            seats = [
                Seat(
                    uid,
                    Electors(ranked),
                    Signer(RUN, uid, keys[uid].ss58_address, keys[uid].sign),
                    accounts[uid],
                    {other: account for other, account in enumerate(accounts) if other != uid},
                    await stack.enter_async_context(S3Connections(server.endpoint)),
                    tmp_path / f"elector-{uid}",
                    delta,
                )
                for uid in range(count)
            ]
            yield Council(server, seats, requests)

    return opened


async def test_five_electors_decide_with_few_requests(council: Opening) -> None:
    async with council(5, delta=2.0) as five:  # a production run's
        five.server.faults.add(r"", Delay(0.05), times=None)
        runs = await five.decide(range(5))
        values = five.values(range(5))
        assert {value_id(value) for value in values} == {value_id(values[0])}
        assert [one.uid for one in values[0].included.included] == [10, 11]
        assert {seat.committed[0].slot for seat in five.seats} == {0}
        writes = sum(request.startswith("PUT") for request in five.requests) / 5
        assert max(run.requests for run in runs) + writes <= 20
        assert len(five.requests) <= 5 * 20


async def test_alone_an_elector_commits_without_a_read(council: Opening) -> None:
    async with council(1) as one:
        (run,) = await one.decide([0])
        assert run.requests == 0
        assert [request.split("/")[-1].partition("?")[0] for request in one.requests] == [
            vote_key(WINDOW, 0, "1"),
            echo_key(WINDOW, 0, 0, "1"),
            decision_key(WINDOW, "1"),
        ]
        assert len(one.values([0])[0].included.included) == 2


async def test_one_silent_one_hanging_one_lying_and_one_equivocating_stop_nobody(council: Opening) -> None:
    """The first four of nine have more than 44 % of the stake."""
    async with council(9, delta=1.0) as nine:
        silent, hanging, lying, two_faced = range(4)
        honest = range(4, 9)
        slow = nine.seats[hanging].account.name
        nine.server.faults.add(rf"GET /{slow}/", Delay(100.0), times=None)
        lie = asyncio.create_task(_lie(nine.seats[lying]))
        twice = asyncio.create_task(_equivocate(nine.seats[two_faced]))
        await nine.decide(honest)
        values = nine.values(honest)
        assert {value_id(value) for value in values} == {value_id(values[0])}
        assert {one.uid: one.sha256 for one in values[0].included.included} == {10: FOUND["10"], 11: FOUND["11"]}
        witness = nine.seats[honest[0]]
        stores = {**witness.box().stores, witness.uid: witness.box().own}
        shown = await DecisionReader(BallotReader(witness.electors, RUN, WINDOW), stores.get, WINDOW).result()
        assert shown.decided == values[0]
        assert {uid for uid, alike in shown.commitments.items() if alike} >= {*honest}
        assert silent not in shown.commitments
        assert sum(shown.stakes.values()) == pytest.approx(1.0)
        for task in (lie, twice):
            task.cancel()
        await asyncio.gather(lie, twice, return_exceptions=True)
        assert silent not in values


async def _lie(seat: Seat) -> None:
    """Votes for updates that no elector has; as proposer, proposes a void window."""
    await seat.put(vote_key(WINDOW, seat.uid, "1"), vote({"10": "00" * 32, "11": "00" * 32}))
    for slot in range(9):
        if seat.electors.proposer(slot) == seat.uid:
            await _propose(seat, slot, void(WINDOW, "1"))


async def _equivocate(seat: Seat) -> None:
    """Publish two votes and two proposals, alternating, as fast as the store accepts them."""
    values = [void(WINDOW, "1"), void(WINDOW, "1").model_copy(update={"peers": LISTED})]
    while True:
        for found, value in zip((FOUND, {}), values, strict=True):
            await seat.put(vote_key(WINDOW, seat.uid, "1"), vote(found))
            await _propose(seat, seat.uid, value)
            await asyncio.sleep(0.3)


async def _propose(seat: Seat, slot: int, value: Value) -> None:
    def sign(document: Document) -> str:
        return sign_document(document, window=WINDOW, signer=seat.signer).decode()

    proposal = sign(Proposal(slot=slot, value=value, votes={}))
    relay = Relay(echo=sign(Echo(slot=slot, value=value_id(value))), proposal=proposal, votes=(), proof=None)
    with contextlib.suppress(Exception):  # one write a second
        await seat.put(echo_key(WINDOW, slot, seat.uid, "1"), relay)


async def test_a_killed_elector_says_nothing_else_after_its_restart(council: Opening) -> None:
    async with council(3) as three:
        seat = three.seats[0]
        box, election = seat.box(), seat.election()
        assert not await box.restore(election)
        first = await box.vote(vote())
        record_ballot(election, first)
        record_ballot(election, await box.carry_out(Propose(0, void(WINDOW, "1"), {}, None)))
        # It is killed, and has another opinion after its restart, even if its disk is lost.
        for folder in (seat.folder, seat.folder / "lost"):
            box, election = seat.box(folder), seat.election()
            restored = await box.restore(election)
            assert restored == (folder == seat.folder)
            again = await box.vote(vote({}))
            assert again == first
            other = Propose(0, void(WINDOW, "1").model_copy(update={"peers": LISTED}), {}, None)
            said = await box.carry_out(other)
            assert isinstance(said, CheckedRelay)
            record_ballot(election, said, restored=True)
            assert said.id == value_id(void(WINDOW, "1"))
            assert not election.act(0.1, 0.1)
        there = await three.seats[1].box().read(Wanted("relay", 0, 0))
        assert isinstance(there, CheckedRelay)
        assert there.id == value_id(void(WINDOW, "1"))


async def test_what_a_restart_interrupted_is_published(council: Opening) -> None:
    """It was signed and stored, and the process was killed before the request."""
    async with council(2) as two:
        seat = two.seats[0]
        box = seat.box()
        await box.vote(vote())
        await seat.connections.store(seat.account.writable).delete(vote_key(WINDOW, 0, "1"))
        assert await seat.box().restore(seat.election())
        assert await two.seats[1].box().read(Wanted("vote", 0, 0)) is not None


async def test_nobody_waits_for_one_who_comes_late(council: Opening) -> None:
    """Two of three decide; the third reads what they have decided."""
    async with council(3) as three:
        await three.decide([0, 2])
        assert three.values([0]) == three.values([2])
        await three.decide([1])
        assert three.values([1]) == three.values([0])
