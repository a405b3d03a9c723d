"""The documents by which electors decide, and the checks of the documents embedded in them.

Signed documents are embedded unchanged, as text: a reader checks every signature itself and does not rely on any
elector's report about another elector.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field

from tplr.chain.electors import Electors
from tplr.errors import PayloadError
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.envelope import MAX_HEADER_BYTES, Author, DocumentT, Run, Signed, body_sha256, open_document
from tplr.schemas import Document, Items, PeerList, ReasonText, Sha256, UidText, Window, Wire

MAX_ELECTORS = 64
# A window's election can void these many windows before it.
VOID_WITHIN = 3
# Number of verified documents that are cached per elector and kind. An honest elector signs one vote, and one echo per
# slot.
REMEMBERED = 4
# Embedding an envelope escapes its quotation marks, which makes it larger. A vote on 256 uids has 30 kB, the votes of
# 20 electors have 700 kB. There are at most 50 electors (``HParams.elector_stake_share``).
MAX_VOTE_BYTES = 2**16
MAX_BALLOT_BYTES = 2**21

Slot = Annotated[int, Field(ge=0, lt=2**40)]
VoteText = Annotated[str, Field(max_length=MAX_VOTE_BYTES + MAX_HEADER_BYTES)]
EchoText = Annotated[str, Field(max_length=2**12)]
ProposalText = VoteText
Votes = Annotated[Items[VoteText], Field(max_length=MAX_ELECTORS)]
Echoes = Annotated[Items[EchoText], Field(max_length=MAX_ELECTORS)]


class Vote(Document):
    """``vote-{window}-{uid}-v{version}.json``: the updates that one elector found for a window.

    Attributes:
        found: SHA-256 of each valid update of a listed or reserve peer, by uid.
        missing: the reason for each other listed or reserve peer.
        peers: the next peer list that this elector wants; None to keep the present one.
        lost: earlier windows whose decided updates this elector does not have and can't get.
    """

    kind: ClassVar[str] = "vote"
    max_bytes: ClassVar[int] = MAX_VOTE_BYTES

    found: Annotated[dict[UidText, Sha256], FailFast()] = Field(max_length=4096)
    missing: Annotated[dict[UidText, ReasonText], FailFast()] = Field(max_length=4096)
    peers: PeerList | None
    lost: Annotated[Items[Window], Field(max_length=VOID_WITHIN)] = ()


class Value(Wire):
    """The subject of a decision: the updates of a window, and the next peer list if it changes.

    Attributes:
        voided: earlier windows in which no update is applied, even if one was decided.
    """

    included: IncludedSet
    peers: PeerList | None
    voided: Annotated[Items[Window], Field(max_length=VOID_WITHIN)] = ()


class Proposal(Document):
    """A value, proposed by the proposer of the slot.

    Attributes:
        votes: hash of each vote that the value is tallied from, by elector; empty if the value is from a proof.
    """

    kind: ClassVar[str] = "proposal"
    max_bytes: ClassVar[int] = MAX_VOTE_BYTES

    slot: Slot
    value: Value
    votes: Annotated[dict[UidText, Sha256], FailFast()] = Field(max_length=MAX_ELECTORS)


class Echo(Document):
    """One elector's support for a value: an honest elector signs at most one in a slot.

    Attributes:
        value: hash of the value's canonical JSON.
    """

    kind: ClassVar[str] = "echo"
    max_bytes: ClassVar[int] = 2**10

    slot: Slot
    value: Sha256


class Commitment(Document):
    """One elector's irrevocable commitment to a value, which is identified as in ``Echo``."""

    kind: ClassVar[str] = "commitment"
    max_bytes: ClassVar[int] = 2**10

    value: Sha256


class Proof(Wire):
    """A value, and echoes of one slot for it by electors with more than half of the stake."""

    slot: Slot
    value: Value
    echoes: Echoes


class Relay(Document):
    """``echo-{window}-{slot}-{uid}-v{version}.json``: an echo, its proposal, and the proposal's votes or proof."""

    kind: ClassVar[str] = "relay"
    max_bytes: ClassVar[int] = MAX_BALLOT_BYTES

    echo: EchoText
    proposal: ProposalText
    votes: Votes
    proof: Proof | None


class Status(Document):
    """``status-{window}-{slot}-{uid}-v{version}.json``: an elector's known votes and proof when a later slot starts."""

    kind: ClassVar[str] = "status"
    max_bytes: ClassVar[int] = MAX_BALLOT_BYTES

    slot: Slot
    votes: Votes
    proof: Proof | None


class Decision(Document):
    """``aggregator-{window}-v{version}.json``: the value that an elector is committed to.

    A value is decided when electors with more than half of the stake are committed to it.

    Attributes:
        slot, echoes: the proof.
        votes: the votes that the value is tallied from; empty if an earlier slot's proposal had them.
        commitments: the author's, and the other electors' that it knows.
    """

    kind: ClassVar[str] = "decision"
    max_bytes: ClassVar[int] = MAX_BALLOT_BYTES

    slot: Slot
    value: Value
    votes: Votes
    echoes: Echoes
    commitments: Echoes


def value_id(value: Value) -> str:
    """Return the identity of a value: the hash of its canonical JSON."""
    return body_sha256(value)


@dataclass(frozen=True)
class CheckedProof:
    """A proof with its verified echoes by elector."""

    slot: int
    value: Value
    id: str
    echoes: Mapping[int, Signed[Echo]]

    def document(self) -> Proof:
        """Return the form that is embedded in documents."""
        return Proof(slot=self.slot, value=self.value, echoes=texts(self.echoes))


@dataclass(frozen=True)
class CheckedRelay:
    """A relay of elector ``uid`` with every part verified; ``id`` identifies the proposed value."""

    uid: int
    id: str
    echo: Signed[Echo]
    proposal: Signed[Proposal]
    votes: Mapping[int, Signed[Vote]]
    proof: CheckedProof | None

    @property
    def slot(self) -> int:
        """The slot of the echo and the proposal."""
        return self.echo.document.slot

    @property
    def value(self) -> Value:
        """The proposed value."""
        return self.proposal.document.value


@dataclass(frozen=True)
class CheckedStatus:
    """A status of elector ``uid`` with every part verified."""

    uid: int
    slot: int
    votes: Mapping[int, Signed[Vote]]
    proof: CheckedProof | None


@dataclass(frozen=True)
class CheckedDecision:
    """A decision of elector ``uid`` with every part verified."""

    uid: int
    proof: CheckedProof
    votes: Mapping[int, Signed[Vote]]
    commitments: Mapping[int, Signed[Commitment]]


def texts(signed: Mapping[int, Signed[DocumentT]]) -> tuple[str, ...]:
    """Return the envelopes as text for embedding, by ascending uid."""
    return tuple(signed[uid].raw.decode() for uid in sorted(signed))


@dataclass(frozen=True)
class BallotReader:
    """Opens the documents of one window's electors; every method raises PayloadError for an invalid document.

    A document that is embedded in several others is verified once, as long as it is among the last ``REMEMBERED`` of
    its elector and kind. No part of a refused document is cached.

    Attributes:
        window: the window that the documents are signed for.
    """

    electors: Electors
    run: Run
    window: int
    _opened: dict[tuple[str, int], tuple[Signed, ...]] = field(default_factory=dict, repr=False)

    def vote(self, raw: bytes, uid: int) -> Signed[Vote]:
        """Open the vote of elector ``uid``."""
        vote = self._open(raw, Vote, uid)
        self._remember({uid: vote})
        return vote

    def relay(self, raw: bytes, uid: int, slot: int) -> CheckedRelay:
        """Open the relay of elector ``uid`` in ``slot``."""
        relay = self._open(raw, Relay, uid).document
        proposer = self.electors.proposer(slot)
        echo = self._open(relay.echo.encode(), Echo, uid)
        proposal = self._open(relay.proposal.encode(), Proposal, proposer)
        votes = self._votes(relay.votes)
        found, proposed = echo.document, proposal.document
        identity = value_id(proposed.value)
        if (found.slot, proposed.slot, found.value) != (slot, slot, identity):
            raise PayloadError(f"relay of uid {uid}: its echo does not match its proposal in slot {slot}")
        if proposed.votes != {str(voter): vote.sha256 for voter, vote in votes.items()}:
            raise PayloadError(f"relay of uid {uid}: its votes differ from those that its proposal lists")
        proof = self._proof(relay.proof)
        self._remember({uid: echo}, {proposer: proposal}, votes, proof.echoes if proof else {})
        return CheckedRelay(uid, identity, echo, proposal, votes, proof)

    def status(self, raw: bytes, uid: int, slot: int) -> CheckedStatus:
        """Open the status of elector ``uid`` at the beginning of ``slot``."""
        status = self._open(raw, Status, uid).document
        if status.slot != slot:
            raise PayloadError(f"status of uid {uid}: slot {status.slot}, expected {slot}")
        votes, proof = self._votes(status.votes), self._proof(status.proof)
        self._remember(votes, proof.echoes if proof else {})
        return CheckedStatus(uid, slot, votes, proof)

    def decision(self, raw: bytes, uid: int) -> CheckedDecision:
        """Open the decision of elector ``uid``."""
        decision = self._open(raw, Decision, uid).document
        proof = self._proof(Proof(slot=decision.slot, value=decision.value, echoes=decision.echoes))
        assert proof is not None
        commitments = self._each(decision.commitments, Commitment)
        if uid not in commitments or any(one.document.value != proof.id for one in commitments.values()):
            raise PayloadError(f"decision of uid {uid}: expected commitments to its value, including its own")
        votes = self._votes(decision.votes)
        self._remember(votes, proof.echoes, commitments)
        return CheckedDecision(uid, proof, votes, commitments)

    def _proof(self, proof: Proof | None) -> CheckedProof | None:
        if proof is None:
            return None
        identity = value_id(proof.value)
        echoes = self._each(proof.echoes, Echo)
        if any((one.document.slot, one.document.value) != (proof.slot, identity) for one in echoes.values()):
            raise PayloadError(f"a proof of slot {proof.slot} has an echo of another value")
        if not self.electors.outweighs(echoes):
            raise PayloadError(f"a proof with echoes of uids {sorted(echoes)}: not more than half of the stake")
        return CheckedProof(proof.slot, proof.value, identity, echoes)

    def _votes(self, embedded: Iterable[str]) -> dict[int, Signed[Vote]]:
        return self._each(embedded, Vote)

    def _each(self, embedded: Iterable[str], schema: type[DocumentT]) -> dict[int, Signed[DocumentT]]:
        """Open embedded envelopes by author, which is read from the header; two of one author are refused."""
        found = {}
        for text in embedded:
            raw = text.encode()
            author = self._author(raw)
            if author in found:
                raise PayloadError(f"two {schema.kind} documents of uid {author}")
            found[author] = self._open(raw, schema, author)
        return found

    def _author(self, raw: bytes) -> int:
        """Return the elector whose hotkey is in the header; the signature is checked afterwards."""
        head = raw[:512].partition(b"\n")[0]
        for one in self.electors.ranked:
            if b'"hotkey":"%s"' % one.hotkey.encode() in head:
                return one.uid
        raise PayloadError(f"embedded document: its author is not an elector: {head[:200]!r}"[:300])

    def _open(self, raw: bytes, schema: type[DocumentT], uid: int) -> Signed[DocumentT]:
        if uid not in self.electors:
            raise PayloadError(f"uid {uid} is not an elector of window {self.window}")
        for known in self._opened.get((schema.kind, uid), ()):
            if known.raw == raw:
                return known
        author = Author(self.run, uid, self.electors.hotkey(uid))
        return open_document(raw, schema, window=self.window, author=author)

    def _remember(self, *accepted: Mapping[int, Signed[Any]]) -> None:
        """Cache the parts of an accepted document, by elector.

        Several threads may do so at once: an entry that gets lost is verified again.
        """
        for parts in accepted:
            for uid, one in parts.items():
                known = self._opened.get((one.kind, uid), ())
                if one not in known:
                    self._opened[one.kind, uid] = (one, *known)[:REMEMBERED]
