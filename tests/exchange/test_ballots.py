"""Signed documents of electors: every embedded signature is checked, and nothing unsigned is accepted."""

import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from tplr.chain import hotkeys
from tplr.chain.electors import Elector, Electors
from tplr.errors import PayloadError
from tplr.exchange import ballots
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.agreed import DecisionReader
from tplr.exchange.ballots import (
    BallotReader,
    Commitment,
    Decision,
    Echo,
    Proof,
    Proposal,
    Relay,
    Status,
    Value,
    Vote,
    value_id,
)
from tplr.exchange.envelope import Run, Signer, body_of, body_sha256, open_document, sign_document
from tplr.exchange.quorum import void
from tplr.keys import decision_key
from tplr.schemas import Document, PeerList, Reason
from tplr.storage.memory import MemoryStore

RUN, WINDOW = Run(3, "1"), 7
KEYS = [hotkeys.new_hotkey() for _ in range(3)]
ELECTORS = Electors(tuple(Elector(uid, KEYS[uid].ss58_address, 30 - uid) for uid in range(3)))
VOTE = Vote(found={"10": "5e" * 32}, missing={"11": Reason.MISSING}, peers=None)
VALUE, OTHER = void(WINDOW, "1"), void(WINDOW + 1, "1")


def sign(uid: int, document: Document, *, window: int = WINDOW) -> bytes:
    signer = Signer(RUN, uid, KEYS[uid].ss58_address, lambda message: hotkeys.sign(KEYS[uid], message))
    return sign_document(document, window=window, signer=signer)


def echo(uid: int, value: Value = VALUE, slot: int = 0) -> str:
    return sign(uid, Echo(slot=slot, value=value_id(value))).decode()


def proof(*uids: int, value: Value = VALUE) -> Proof:
    return Proof(slot=0, value=value, echoes=tuple(map(echo, uids)))


def relay(uid: int = 1, **changes: Any) -> bytes:
    votes = changes.pop("votes", (sign(2, VOTE).decode(),))
    proposal = sign(0, Proposal(slot=0, value=VALUE, votes={"2": body_sha256(VOTE)})).decode()
    return sign(uid, Relay(**{"echo": echo(uid), "proposal": proposal, "votes": votes, "proof": None} | changes))


def decision(uid: int = 1, **changes: Any) -> bytes:
    own = sign(uid, Commitment(value=value_id(VALUE))).decode()
    fields = {"slot": 0, "value": VALUE, "votes": (), "echoes": proof(0, 1).echoes, "commitments": (own,)}
    return sign(uid, Decision(**fields | changes))


@pytest.fixture
def reader() -> BallotReader:
    return BallotReader(ELECTORS, RUN, WINDOW)


def test_what_electors_signed_is_opened(reader) -> None:
    assert reader.vote(sign(1, VOTE), 1).document == VOTE
    found = reader.relay(relay(), 1, 0)
    assert (found.id, found.slot, found.value, [*found.votes]) == (value_id(VALUE), 0, VALUE, [2])
    status = reader.status(sign(2, Status(slot=4, votes=(), proof=proof(0, 1))), 2, 4)
    assert status.proof
    assert (status.proof.slot, sorted(status.proof.echoes)) == (0, [0, 1])
    assert reader.decision(decision(), 1).proof.value == VALUE


async def test_commitments_in_several_buckets_count_together(reader) -> None:
    """Each elector was killed before it published that it had read the other's commitment."""
    stores = {uid: MemoryStore(f"elector-{uid}") for uid in range(3)}
    for uid in (0, 1):
        assert await DecisionReader(reader, stores.get, WINDOW).look() is None
        await stores[uid].put(decision_key(WINDOW, "1"), decision(uid))
    looking = DecisionReader(reader, stores.get, WINDOW)
    assert await looking.look() == VALUE
    shown = await looking.result()
    assert (shown.decided, shown.commitments) == (VALUE, {0: True, 1: True})


async def test_a_refused_decision_is_not_read_again_while_others_may_decide(reader) -> None:
    """A reader polls for seconds, and a hostile elector's decision may have 2 MiB."""
    stores = {uid: MemoryStore(f"elector-{uid}") for uid in range(3)}
    await stores[2].put(decision_key(WINDOW, "1"), b"not a decision")
    asked: list[int] = []

    def store_of(uid: int) -> MemoryStore:
        asked.append(uid)
        return stores[uid]

    looking = DecisionReader(reader, store_of, WINDOW)
    for _ in range(9):
        assert await looking.look() is None
    assert asked.count(2) == 1
    assert asked.count(0) >= 8
    assert asked.count(1) >= 8
    for uid in (0, 1):
        await stores[uid].put(decision_key(WINDOW, "1"), decision(uid))
    assert await looking.look() == VALUE


def test_what_many_documents_embed_is_verified_once(reader, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counted(raw: bytes, schema: type[Document], **options: Any) -> Any:
        opened.append(schema.kind)
        return open_document(raw, schema, **options)

    monkeypatch.setattr(ballots, "open_document", counted)
    embedded = {"votes": (sign(2, VOTE).decode(),), "proof": proof(0, 1)}
    for slot in range(3):
        reader.status(sign(1, Status(slot=slot, **embedded)), 1, slot)
    assert sorted(opened) == ["echo", "echo", "status", "status", "status", "vote"]


def test_what_a_hostile_elector_signs_does_not_fill_the_memory(reader) -> None:
    """Its relays are refused and read again in each round; its statuses are accepted, each with a new vote."""

    def relays() -> None:
        for number in range(8):
            raw = sign(1, Relay(echo="x", proposal=f"{number}", votes=("v" * 65000,) * 31, proof=None))
            with contextlib.suppress(PayloadError):
                reader.relay(raw, 1, 0)

    def statuses() -> None:
        for slot in range(64):
            vote = Vote(found={f"{slot}": "5e" * 32}, missing={}, peers=None)
            votes = tuple(sign(uid, vote).decode() for uid in (1, 2))
            reader.status(sign(1, Status(slot=slot, votes=votes, proof=proof(0, 1))), 1, slot)

    assert memory_after(relays) < 2**16
    assert memory_after(statuses) < 2**17


def memory_after(work: Callable[[], None]) -> int:
    """Return the bytes that are still in use afterwards."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


FORGED: dict[str, Callable[[BallotReader], Any]] = {
    "a vote of somebody else": lambda reader: reader.vote(sign(2, VOTE), 1),
    "a vote of another window": lambda reader: reader.vote(sign(1, VOTE, window=8), 1),
    "a vote of no elector": lambda reader: reader.vote(sign(1, VOTE), 9),
    "an echo of another value": lambda reader: reader.relay(relay(echo=echo(1, OTHER)), 1, 0),
    "an echo of another slot": lambda reader: reader.relay(relay(echo=echo(1, VALUE, 1)), 1, 0),
    "another elector's echo": lambda reader: reader.relay(relay(echo=echo(2)), 1, 0),
    "a proposal of another slot": lambda reader: reader.relay(relay(), 1, 3),
    "a proposal whose turn it is not": lambda reader: reader.relay(relay(), 1, 1),
    "a proposal of an earlier slot of the same proposer": lambda reader: reader.relay(
        relay(echo=echo(1, VALUE, 3)), 1, 3
    ),
    "a proposal by another elector": lambda reader: reader.relay(
        relay(proposal=sign(2, Proposal(slot=0, value=VALUE, votes={"2": body_sha256(VOTE)})).decode()), 1, 0
    ),
    "a proof with echoes of two slots": lambda reader: reader.relay(
        relay(proof=Proof(slot=0, value=VALUE, echoes=(echo(0), echo(1, VALUE, 1)))), 1, 0
    ),
    "a proposal without its votes": lambda reader: reader.relay(relay(votes=()), 1, 0),
    "other votes": lambda reader: reader.relay(relay(votes=(sign(1, VOTE).decode(),)), 1, 0),
    "a vote twice": lambda reader: reader.relay(relay(votes=(sign(2, VOTE).decode(),) * 2), 1, 0),
    "a proof by half": lambda reader: reader.relay(relay(proof=proof(0)), 1, 0),
    "a proof with one echo twice": lambda reader: reader.relay(relay(proof=proof(0, 0)), 1, 0),
    "a proof of another value": lambda reader: reader.relay(
        relay(proof=Proof(slot=0, value=OTHER, echoes=proof(0, 1).echoes)), 1, 0
    ),
    "a status of another slot": lambda reader: reader.status(sign(2, Status(slot=4, votes=(), proof=None)), 2, 5),
    "a decision without proof": lambda reader: reader.decision(decision(echoes=()), 1),
    "a decision nobody is committed to": lambda reader: reader.decision(decision(commitments=()), 1),
    "a decision to which another one is committed": lambda reader: reader.decision(
        decision(commitments=(sign(2, Commitment(value=value_id(VALUE))).decode(),)), 1
    ),
    "a commitment to another value": lambda reader: reader.decision(
        decision(commitments=(sign(1, Commitment(value=value_id(OTHER))).decode(),)), 1
    ),
    "no envelope": lambda reader: reader.relay(relay(votes=("nonsense",)), 1, 0),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_what_they_did_not_sign_is_refused(reader, forgery: str) -> None:
    with pytest.raises(PayloadError):
        FORGED[forgery](reader)


@pytest.mark.parametrize(("electors", "named"), [(20, 256), (50, 0)])
def test_the_documents_of_electors_and_256_uids_have_room(electors: int, named: int) -> None:
    """Of 20 with any votes, and of as many as the configuration allows with usual ones: each uid is in one group."""
    found = {str(uid): "5e" * 32 for uid in range(65000, 65256)}
    listed = PeerList(
        peers=tuple(range(65000, 65256)),
        reserve_peers=tuple(range(65000, 65000 + named)),
        probation=tuple(range(65000, 65000 + named)),
        initial_selection=False,
        sync_window=10**9,
        first_effective_window=10**9,
    )
    missing = dict.fromkeys([*found][:named], Reason.HASH_MISMATCH)
    vote = Vote(found=found, missing=missing, peers=listed)
    assert len(body_of(vote)) < Vote.max_bytes
    included = IncludedSet(
        window=WINDOW,
        version="1",
        included=tuple(Included(uid=int(uid), sha256=sha256, size=10**12) for uid, sha256 in found.items()),
        skipped=vote.missing,
        success_rate=0.5,
    )
    value = Value(included=included, peers=listed)
    votes = tuple(sign(1, vote).decode() for _ in range(electors))
    echoes = tuple(echo(1) for _ in range(electors))
    hashes = {str(uid): "5e" * 32 for uid in range(65000, 65000 + electors)}
    proposal = sign(1, Proposal(slot=2**39, value=value, votes=hashes)).decode()
    many = Proof(slot=2**39, value=value, echoes=echoes)
    for document in (
        Relay(echo=echo(1), proposal=proposal, votes=votes, proof=many),
        Status(slot=1, votes=votes, proof=many),
        Decision(slot=1, value=value, votes=votes, echoes=echoes, commitments=echoes),
    ):
        assert len(body_of(document)) < document.max_bytes, type(document).__name__
