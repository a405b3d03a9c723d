"""The election of the run's start: one slot in each window, until electors agree on the first peer list."""

import asyncio
import contextlib
from pathlib import Path

from tplr.chain.electors import Electors
from tplr.comms import Comms
from tplr.errors import ChainUnavailable, ObjectNotFound, PayloadError, StoreError
from tplr.exchange.ballot_box import feed
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


async def decide_start(context: NodeContext, hparams: HParams, wish: PeerList, folder: Path) -> PeerList | None:
    """Take part for the rest of this window; the run's first list, whose first window is the start, if it is decided.

    Slot r is window r, so that all electors are in the same one.

    Args:
        wish: the first list that this node wants.
        folder: for what it signs.

    Raises:
        ChainUnavailable, StateError, StoreError: not now.
    """
    comms, clock, delta = context.comms, context.clock, hparams.relay_seconds
    if earlier := await _decided_before(context):
        return earlier
    alone = comms.alone
    electors = comms.electors if alone else await _electors(comms, clock.window)
    if not alone and clock.seconds_since(clock.window) > delta:
        # Too late for this slot.
        electors = await _electors(comms, await clock.wait_for_window(clock.window + 1))
    if comms.uid not in electors:
        return None
    question = StartQuestion(
        version=hparams.version, at_most=hparams.max_topk_peers, margin=hparams.peer_list_window_margin
    )
    election = Election(electors, comms.uid, question, delta)
    box = comms.ballot_box(None, electors, folder)
    if not await box.restore(election):
        feed(election, await box.vote(Vote(found={}, missing={}, peers=wish)))

    # The slot of a window begins with it; for an elector alone, it is never too late.
    begins, passed = clock.window * SLOT * delta, 0.0 if alone else clock.seconds_since(clock.window)
    run = ElectionRun(election, box, delta, asyncio.get_running_loop().time() - passed - begins)

    async def committed(proof: CheckedProof) -> None:
        logger.info("committed to the start of the run in slot %d", proof.slot)

    await run.finish(until=begins + (SLOT - POLL) * delta, committed=committed)
    return election.decided.value.peers if election.decided else None


async def _electors(comms: Comms, window: int) -> Electors:
    """Those of the slot of ``window``: as of the window before, whose first block is final already."""
    return await comms.electors_in(max(0, window - 1))


async def _decided_before(context: NodeContext) -> PeerList | None:
    """What the electors of an earlier window decided, before others became electors."""
    comms = context.comms
    for uid in comms.electors.uids:
        store = comms.store_of(uid)
        if store is None or uid == comms.uid:
            continue
        author = comms.author(uid)
        try:
            raw = await store.get(decision_key(None, author.run.version), max_bytes=envelope_cap(Decision.max_bytes))
            slot = open_document(raw, Decision, window=WHOLE_RUN, author=author).document.slot
            if slot > context.clock.window:
                raise PayloadError(f"start of the run by uid {uid}: decided in window {slot}, which is not yet")
        except ObjectNotFound:
            continue
        except (PayloadError, StoreError) as error:
            logger.info("start of the run by uid %d not read: %s", uid, error)
            continue
        # Who was alone then did not wait for the next window.
        for window in (slot - 1, slot, slot + 1):
            with contextlib.suppress(ChainUnavailable, PayloadError):
                electors = await comms.electors_in(window)
                decision = BallotReader(electors, author.run, WHOLE_RUN).decision(raw, uid)
                if electors.outweighs(decision.commitments):
                    return decision.proof.value.peers
    return None
