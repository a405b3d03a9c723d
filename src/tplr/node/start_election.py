"""The election of the run's start: one slot in each window, until electors agree on the first peer list."""

import asyncio
from pathlib import Path

from tplr.chain.electors import Electors
from tplr.comms import Comms
from tplr.errors import ChainUnavailable, ObjectNotFound, PayloadError, StoreError
from tplr.exchange.ballot_box import record_ballot
from tplr.exchange.ballots import BallotReader, CheckedProof, Decision, Vote
from tplr.exchange.election import SLOT, Election
from tplr.exchange.election_run import POLL, ElectionRun
from tplr.exchange.envelope import WHOLE_RUN, envelope_cap, open_document
from tplr.exchange.quorum import StartQuestion
from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.hparams import HParams
from tplr.keys import decision_key
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.schemas import ObjectInfo, PeerList

# Consecutive slots: electors that take part only in every second window may never take part in the same one.
SLOTS = 3


async def decide_start(context: NodeContext, hparams: HParams, wish: PeerList, folder: Path) -> PeerList | None:
    """Take part in a few windows; return the run's first list if it is decided. Its first window is the start.

    Slot r is window r, so that all electors are in the same slot. Its electors are those of the previous window, even
    if there is only one. So later electors can verify that it was the only one, and do not decide on another start.

    Args:
        wish: the first list that this node wants.
        folder: for signed ballots.

    Raises:
        ChainUnavailable, StateError, StoreError: taking part is not possible now.
    """
    for _ in range(SLOTS):
        if peers := await _take_part(context, hparams, wish, folder):
            return peers
    return None


async def _take_part(context: NodeContext, hparams: HParams, wish: PeerList, folder: Path) -> PeerList | None:
    """Take part in one slot."""
    comms, clock, delta = context.comms, context.clock, hparams.relay_seconds
    if earlier := await decided_before(context, hparams):
        return earlier
    window, length = clock.window, hparams.blocks_per_window * clock.block_time
    electors = await _electors(comms, window)
    # A sole elector must publish before the electors of the next window read its decision, in the window's last Delta.
    latest = length - 3 * delta if electors.uids == (comms.uid,) else delta
    if clock.seconds_since(window) > latest:
        await asyncio.sleep(max(0.0, length - delta - clock.seconds_since(window)))
        if earlier := await decided_before(context, hparams):
            return earlier
        window = await clock.wait_for_window(window + 1)
        electors = await _electors(comms, window)
    if comms.uid not in electors:
        return None
    alone = electors.uids == (comms.uid,)
    question = StartQuestion(
        version=hparams.version, at_most=hparams.max_topk_peers, margin=hparams.peer_list_window_margin
    )
    election = Election(electors, comms.uid, question, delta)
    box = comms.ballot_box(None, electors, folder)
    if not await box.restore(election):
        record_ballot(election, await box.vote(Vote(found={}, missing={}, peers=wish)))

    # A slot begins with its window; a sole elector may begin later, so its slot begins now.
    begins, passed = window * SLOT * delta, 0.0 if alone else clock.seconds_since(window)
    run = ElectionRun(election, box, delta, asyncio.get_running_loop().time() - passed - begins)

    async def committed(proof: CheckedProof) -> None:
        logger.info("committed to the start of the run in slot %d", proof.slot)

    await run.finish(until=begins + (SLOT - POLL) * delta, committed=committed)
    return election.decided.value.peers if election.decided else None


async def _electors(comms: Comms, window: int) -> Electors:
    """Return the electors of the slot of ``window``: those of the previous window, whose first block is final."""
    return await comms.electors_in(max(0, window - 1))


async def decided_before(context: NodeContext, hparams: HParams) -> PeerList | None:
    """Return the list that the electors of an earlier window decided, or None; waits for at most Delta."""
    others = [uid for uid in context.comms.electors.uids if uid != context.comms.uid]
    found = await asyncio.gather(*(_decided_by(uid, context, hparams) for uid in others))
    return next((peers for peers in found if peers), None)


async def _decided_by(uid: int, context: NodeContext, hparams: HParams) -> PeerList | None:
    comms, delta = context.comms, hparams.relay_seconds
    store, author = comms.store_of(uid), comms.author(uid)
    if store is None:
        return None
    key = decision_key(None, author.run.version)
    try:
        async with asyncio.timeout(delta):
            info = await store.head(key)
            raw = await store.get(key, max_bytes=envelope_cap(Decision.max_bytes), if_match=info.etag)
        document = await asyncio.to_thread(open_document, raw, Decision, window=WHOLE_RUN, author=author)
        slot = document.document.slot
        if slot > context.clock.window:
            raise PayloadError(f"start of the run by uid {uid}: decided in window {slot}, which is in the future")
        electors = await _electors(comms, slot)
        decision = await asyncio.to_thread(BallotReader(electors, author.run, WHOLE_RUN).decision, raw, uid)
        await _check_written(info, slot, context)
        peers = decision.proof.value.peers
        if peers:
            _check_start(peers, slot, hparams)
    except ObjectNotFound:
        return None
    except (ChainUnavailable, PayloadError, StoreError, TimeoutError) as error:
        logger.info("start of the run by uid %d not read: %s", uid, error or f"no answer in {delta:.2f} s")
        return None
    return peers if electors.outweighs(decision.commitments) else None


async def _check_written(info: ObjectInfo, slot: int, context: NodeContext) -> None:
    """Raise PayloadError for a decision that was written long after its slot.

    Electors of an earlier window may have had more than half of the stake only then, such as the first one that had a
    bucket. Without this they could choose a start at any later time.
    """
    last = slot + SLOTS
    if context.clock.window <= last + 1:
        return
    closed = (await context.comms.window_start(last + 1)).time + STORE_CLOCK_SECONDS
    if info.in_parts or info.last_modified > closed:
        raise PayloadError(f"{info.key}: written at {info.last_modified:.0f}, expected by {closed:.0f} for slot {slot}")


def _check_start(peers: PeerList, slot: int, hparams: HParams) -> None:
    """Raise PayloadError unless a list is one that electors can decide until ``slot`` (``StartQuestion``).

    A sole elector has nobody that checks its list, and a start that is far ahead would never come.
    """
    tallied, start = peers.sync_window, peers.first_effective_window
    if tallied > slot or start != tallied + hparams.peer_list_window_margin:
        raise PayloadError(f"a start in window {start}, tallied in window {tallied} and decided in slot {slot}")
