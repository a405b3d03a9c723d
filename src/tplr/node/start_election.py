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
from tplr.hparams import HParams
from tplr.keys import decision_key
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.schemas import PeerList

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
    if earlier := await _decided_before(context, delta):
        return earlier
    window, length = clock.window, hparams.blocks_per_window * clock.block_time
    electors = await _electors(comms, window)
    # A sole elector must publish before the electors of the next window read its decision, in the window's last Delta.
    latest = length - 3 * delta if electors.uids == (comms.uid,) else delta
    if clock.seconds_since(window) > latest:
        await asyncio.sleep(max(0.0, length - delta - clock.seconds_since(window)))
        if earlier := await _decided_before(context, delta):
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


async def _decided_before(context: NodeContext, delta: float) -> PeerList | None:
    """Return the list that the electors of an earlier window decided, or None; waits for at most Delta."""
    others = [uid for uid in context.comms.electors.uids if uid != context.comms.uid]
    found = await asyncio.gather(*(_decided_by(uid, context, delta) for uid in others))
    return next((peers for peers in found if peers), None)


async def _decided_by(uid: int, context: NodeContext, delta: float) -> PeerList | None:
    comms = context.comms
    store, author = comms.store_of(uid), comms.author(uid)
    if store is None:
        return None
    try:
        async with asyncio.timeout(delta):
            raw = await store.get(decision_key(None, author.run.version), max_bytes=envelope_cap(Decision.max_bytes))
        document = await asyncio.to_thread(open_document, raw, Decision, window=WHOLE_RUN, author=author)
        slot = document.document.slot
        if slot > context.clock.window:
            raise PayloadError(f"start of the run by uid {uid}: decided in window {slot}, which is in the future")
        electors = await _electors(comms, slot)
        decision = await asyncio.to_thread(BallotReader(electors, author.run, WHOLE_RUN).decision, raw, uid)
    except ObjectNotFound:
        return None
    except (ChainUnavailable, PayloadError, StoreError, TimeoutError) as error:
        logger.info("start of the run by uid %d not read: %s", uid, error or f"no answer in {delta:.2f} s")
        return None
    return decision.proof.value.peers if electors.outweighs(decision.commitments) else None
