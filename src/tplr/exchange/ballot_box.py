"""Ballots in buckets: reads other electors' ballots; writes this node's own once and restores them after a restart."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tplr.errors import ObjectNotFound, ObjectTooLarge, PayloadError, PreconditionFailed, StoreError
from tplr.exchange.ballots import (
    BallotReader,
    CheckedDecision,
    CheckedProof,
    CheckedRelay,
    CheckedStatus,
    Commitment,
    Decision,
    Echo,
    Proof,
    Proposal,
    Relay,
    Status,
    Vote,
    texts,
    value_id,
)
from tplr.exchange.election import Action, Commit, Election, Kind, Propose, Repeat, SendStatus, Wanted
from tplr.exchange.envelope import Signed, Signer, envelope_cap, sign_document
from tplr.files import atomic_write
from tplr.keys import decision_key, echo_key, status_key, vote_key
from tplr.logging import logger
from tplr.schemas import Document
from tplr.storage import ObjectStore
from tplr.storage.retry import with_retry

Ballot = Signed[Vote] | CheckedRelay | CheckedStatus | CheckedDecision

SIZES: dict[Kind, int] = {
    "vote": Vote.max_bytes,
    "relay": Relay.max_bytes,
    "status": Status.max_bytes,
    "decision": Decision.max_bytes,
}


@dataclass(frozen=True)
class BallotBox:
    """The ballots of one election.

    Attributes:
        subject: the window; None for the start of the run.
        own: this node's bucket, writable.
        stores: the other electors' buckets by uid.
        folder: keeps the ballots that this node has signed, so that it does not sign different ones after a restart.
        seconds: time limit for writing a ballot; R2 accepts one write per second for a key.
        left_out: files that ``restore`` has logged; shared by all boxes of a folder, so that each is logged once.
    """

    subject: int | None
    reader: BallotReader
    signer: Signer
    own: ObjectStore
    stores: Mapping[int, ObjectStore]
    folder: Path
    seconds: float
    left_out: set[Path] = field(default_factory=set, repr=False)
    _refused: set[Wanted] = field(default_factory=set, init=False, repr=False)

    # Others' ballots

    async def read(self, wanted: Wanted) -> Ballot | None:
        """Return the ballot, or None if it is not published, not readable now, or not valid.

        A ballot that is not valid is not read again. An honest elector publishes only valid ones. To refuse a large one
        takes a tenth of a second, and ballots are read several times a second, so the others' would be read too late.
        """
        store = self.stores.get(wanted.uid)
        if store is None or wanted in self._refused:
            return None
        try:
            return await self._read(store, wanted)
        except ObjectNotFound:
            return None
        except (StoreError, PayloadError) as error:
            logger.info("%s of uid %d not read: %s", wanted.kind, wanted.uid, error)
            return None

    async def _read(self, store: ObjectStore, wanted: Wanted) -> Ballot:
        try:
            raw = await store.get(self._key(wanted), max_bytes=envelope_cap(SIZES[wanted.kind]))
        except ObjectTooLarge:
            self._refused.add(wanted)
            raise
        return await asyncio.to_thread(self._open_once, raw, wanted)

    def _open_once(self, raw: bytes, wanted: Wanted) -> Ballot:
        """As ``_open``; a refusal is noted here because the reader may have stopped waiting for this thread."""
        try:
            return self._open(raw, wanted)
        except PayloadError:
            self._refused.add(wanted)
            raise

    def _key(self, wanted: Wanted) -> str:
        version = self.signer.run.version
        match wanted.kind:
            case "vote":
                return vote_key(self.subject, wanted.uid, version)
            case "relay":
                return echo_key(self.subject, wanted.slot, wanted.uid, version)
            case "status":
                return status_key(self.subject, wanted.slot, wanted.uid, version)
            case "decision":
                return decision_key(self.subject, version)

    def _open(self, raw: bytes, wanted: Wanted) -> Ballot:
        match wanted.kind:
            case "vote":
                return self.reader.vote(raw, wanted.uid)
            case "relay":
                return self.reader.relay(raw, wanted.uid, wanted.slot)
            case "status":
                return self.reader.status(raw, wanted.uid, wanted.slot)
            case "decision":
                return self.reader.decision(raw, wanted.uid)

    # The own ballots

    async def restore(self, election: Election) -> bool:
        """Feed ``election`` the ballots that this node signed before a restart; return whether it has voted.

        A ballot in ``folder`` that is not published is published. If another one is, others have read that one, and it
        is used: the node may have been killed before it replaced either. A file that is not a ballot of this election,
        such as one of an earlier run, is left out.

        Raises:
            StoreError: the bucket does not answer.
            StateError: a ballot can't be stored in ``folder``.
        """
        voted = False
        for path in await asyncio.to_thread(lambda: sorted(self.folder.glob("*-*"))):
            name, _, slot = path.name.partition("-")
            kind: Kind | None = next((kind for kind in SIZES if kind == name), None)
            if kind is None or not slot.isdecimal():
                continue
            own = Wanted(kind, self.signer.uid, int(slot))
            try:
                raw = await asyncio.to_thread(path.read_bytes)
                ballot = await asyncio.to_thread(self._open, raw, own)
                ballot = await self._publish_once(own, path, raw, ballot)
            except (OSError, PayloadError) as error:
                if path not in self.left_out:
                    logger.warning("%s not restored: %s", path, error)
                    self.left_out.add(path)
                continue
            record_ballot(election, ballot, restored=True)
            voted |= kind == "vote"
        return voted

    async def clear(self) -> None:
        """Delete the stored ballots of this node after the election has ended."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def vote(self, vote: Vote) -> Ballot:
        """Publish this node's vote and return the one that counts: an earlier vote if there is one.

        Raises:
            StoreError: the vote is not published.
            StateError: the vote can't be stored in ``folder``.
        """
        return await self._publish(Wanted("vote", self.signer.uid, 0), lambda: self._sign(vote))

    async def carry_out(self, action: Action) -> Ballot:
        """Publish the ballot of an action and return it, to be fed to the election; raises as ``vote``."""
        uid = self.signer.uid
        match action:
            case SendStatus(slot, votes, proof):
                status = Status(slot=slot, votes=texts(votes), proof=_embedded(proof))
                return await self._publish(Wanted("status", uid, slot), lambda: self._sign(status))
            case Propose(slot, value, votes, proof):

                def proposed() -> bytes:
                    named = {str(voter): one.sha256 for voter, one in votes.items()}
                    proposal = self._sign(Proposal(slot=slot, value=value, votes=named)).decode()
                    return self._relay(slot, value_id(value), proposal, texts(votes), proof)

                return await self._publish(Wanted("relay", uid, slot), proposed)
            case Repeat(relay):

                def repeated() -> bytes:
                    proposal = relay.proposal.raw.decode()
                    return self._relay(relay.slot, relay.id, proposal, texts(relay.votes), relay.proof)

                return await self._publish(Wanted("relay", uid, relay.slot), repeated)
            case Commit(proof, votes, others):

                def committed() -> bytes:
                    own = self._sign(Commitment(value=proof.id)).decode()
                    known = [text for voter, text in zip(sorted(others), texts(others), strict=True) if voter != uid]
                    decision = Decision(
                        slot=proof.slot,
                        value=proof.value,
                        votes=texts(votes),
                        echoes=texts(proof.echoes),
                        commitments=(own, *known),
                    )
                    return self._sign(decision)

                # The first decision is binding; a later one has the same value and more commitments.
                return await self._publish(Wanted("decision", uid, 0), committed, again=uid in others)

    def _relay(
        self, slot: int, identity: str, proposal: str, votes: tuple[str, ...], proof: CheckedProof | None
    ) -> bytes:
        echo = self._sign(Echo(slot=slot, value=identity)).decode()
        return self._sign(Relay(echo=echo, proposal=proposal, votes=votes, proof=_embedded(proof)))

    def _sign(self, document: Document) -> bytes:
        return sign_document(document, window=self.reader.window, signer=self.signer)

    async def _publish(self, wanted: Wanted, make: Callable[[], bytes], *, again: bool = False) -> Ballot:
        """Sign, store in ``folder``, then publish; a ballot already stored or published is used instead.

        Args:
            again: replace an existing ballot.
        """
        path = self.folder / f"{wanted.kind}-{wanted.slot}"
        stored = None if again else await asyncio.to_thread(self._stored, path, wanted)
        if stored:
            return await self._publish_once(wanted, path, *stored)
        raw = await asyncio.to_thread(make)
        await asyncio.to_thread(atomic_write, path, raw)
        return await self._publish_once(wanted, path, raw, again=again)

    def _stored(self, path: Path, wanted: Wanted) -> tuple[bytes, Ballot] | None:
        """Return the stored ballot, or None if there is none; a damaged one, or one of another run, binds nobody."""
        try:
            raw = path.read_bytes()
            return raw, self._open(raw, wanted)
        except FileNotFoundError:
            return None
        except (OSError, PayloadError) as error:
            logger.warning("%s is replaced: %s", path, error)
            return None

    async def _publish_once(
        self, wanted: Wanted, path: Path, raw: bytes, ballot: Ballot | None = None, *, again: bool = False
    ) -> Ballot:
        """Publish a ballot that is stored at ``path``; one that is already published is used instead, and stored.

        An object that is no ballot of this election binds nobody, because no elector accepts it, and is replaced.

        Args:
            ballot: of ``raw``, if it is known: to check a large one takes a tenth of a second.
        """
        key = self._key(wanted)
        try:
            await self._put(key, raw, create_only=not again)
        except PreconditionFailed:
            # The response to the first attempt was lost, or the ballot was published before ``folder`` was lost.
            try:
                there = await with_retry(
                    lambda: self.own.get(key, max_bytes=envelope_cap(SIZES[wanted.kind])), deadline_seconds=self.seconds
                )
                if there == raw and ballot:
                    return ballot
                published = await asyncio.to_thread(self._open, there, wanted)
            except (ObjectTooLarge, PayloadError) as error:
                logger.warning("%s in this node's bucket is replaced: %s", key, error)
                await self._put(key, raw, create_only=False)
            else:
                if there != raw:
                    await asyncio.to_thread(atomic_write, path, there)
                return published
        return ballot or await asyncio.to_thread(self._open, raw, wanted)

    async def _put(self, key: str, raw: bytes, *, create_only: bool) -> None:
        await with_retry(lambda: self.own.put(key, raw, create_only=create_only), deadline_seconds=self.seconds)


def record_ballot(election: Election, ballot: Ballot, *, restored: bool = False) -> None:
    """Pass a ballot to the method of ``election`` for its kind."""
    match ballot:
        case CheckedRelay():
            election.relay(ballot, restored=restored)
        case CheckedStatus():
            election.status(ballot)
        case CheckedDecision():
            election.decision(ballot)
        case _:
            election.vote(ballot)


def _embedded(proof: CheckedProof | None) -> Proof | None:
    return None if proof is None else proof.document()
