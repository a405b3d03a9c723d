"""Finds how many steps behind each miner is, by the proofs in its reports: hashes of entries of its model."""

import asyncio
import contextlib
from collections.abc import Iterable

from tplr.comms import Comms
from tplr.errors import ObjectNotFound, ObjectTooLarge, PayloadError, StoreError, StoreUnavailable
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.observation import Observation
from tplr.node.train_state import TrainState
from tplr.schemas import OUT_OF_SYNC, UNREAD
from tplr.seeds import derive, proof_seed
from tplr.storage.retry import with_retry

REPORT_SECONDS = 10.0  # time limit for all reports of one miner
ALL_SECONDS = 30.0  # time limit for all miners, so that slow buckets do not delay the window
CONCURRENCY = 64
UNSETTLED = 2  # number of newest windows of which a node may not know yet that they are void


class SyncProofs:
    """Compares reports of past windows with this validator's model. Call ``note`` before the window is applied."""

    def __init__(self, train_state: TrainState, comms: Comms, hparams: HParams) -> None:
        self._train_state = train_state
        self._comms = comms
        self._hparams = hparams
        # Expected proofs by window and uid, kept for late reports.
        self._expected: dict[int, dict[int, str]] = {}

    async def note(self, seen: Observation, uids: Iterable[int]) -> None:
        """Record how many steps behind these uids are.

        A missing, malformed or too large report is not a proof. ``UNREAD`` is recorded if a bucket refuses the request,
        or does not answer while more than half of the asked ones do, so that the fault is not this validator's. A uid
        that is not asked in time, because other buckets are slow, is not judged; the order differs in each window. No
        uid is judged right after a void window.
        """
        newest, uids = seen.window - 1, sorted(uids)
        start = self._train_state.start_window
        if newest < start or await after_void(self._comms, start, newest):
            return
        block_hash = await self._comms.window_hash(seen.window)
        self._expected[newest] = await asyncio.to_thread(expected_proofs, self._train_state, uids, newest, block_hash)
        for old in [window for window in self._expected if window < newest - self._hparams.sync_max_steps_behind]:
            del self._expected[old]
        slots = asyncio.Semaphore(CONCURRENCY)
        found: dict[int, int | None] = {}
        unreached: set[int] = set()

        async def one(uid: int) -> None:
            async with slots:
                unreached.add(uid)
                with contextlib.suppress(StoreUnavailable, TimeoutError):
                    async with asyncio.timeout(REPORT_SECONDS):
                        found[uid] = await self.behind(uid, newest)
                    unreached.remove(uid)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALL_SECONDS), asyncio.TaskGroup() as group:
                for uid in sorted(uids, key=lambda uid: derive("sync-proofs", block_hash, uid)):
                    group.create_task(one(uid))
        for uid, behind in found.items():
            seen.note(uid, behind=behind)
        if len(unreached) < len(found):
            for uid in unreached:
                seen.note(uid, behind=UNREAD)

    async def behind(self, uid: int, newest: int) -> int | None:
        """Return the number of windows between ``newest`` and the last window with a valid proof of ``uid``.

        ``OUT_OF_SYNC`` if there is no valid proof, ``UNREAD`` if the bucket refuses the request, and None if this
        validator does not know the expected proof. Raises StoreUnavailable.
        """
        oldest = max(self._train_state.start_window, newest - self._hparams.sync_max_steps_behind)
        for window in range(newest, oldest - 1, -1):
            try:
                report = await with_retry(
                    lambda window=window: self._comms.get_report(uid, window), deadline_seconds=REPORT_SECONDS
                )
            except ObjectNotFound:
                continue
            except StoreUnavailable:
                raise
            except (PayloadError, ObjectTooLarge):
                return OUT_OF_SYNC
            except StoreError:
                return UNREAD
            expected = self._expected.get(window, {}).get(uid)
            if expected is None:
                return None
            return newest - window if report.proof == expected else OUT_OF_SYNC
        return OUT_OF_SYNC


def expected_proofs(train_state: TrainState, uids: Iterable[int], window: int, block_hash: str) -> dict[int, str]:
    """Compute the proofs, by uid, of nodes that hold this model after ``window``. Blocks.

    Args:
        block_hash: of the next window's first block.
    """
    return {uid: train_state.fingerprint(proof_seed(uid=uid, window=window, block_hash=block_hash)) for uid in uids}


async def after_void(comms: Comms, start_window: int, newest: int) -> bool:
    """Return whether one of the newest ``UNSETTLED`` windows is void although it had peers.

    A node that did not learn this in time has applied the updates that it gathered, as the rules require. It reports
    that model until it rolls back, so such a report is not evidence against its author.
    """
    for window in range(max(newest - UNSETTLED + 1, start_window), newest + 1):
        included = await comms.get_included(window)
        if included and not included.included and not included.skipped:
            peers = await comms.get_peer_list(window)
            if peers and peers.peers:
                logger.info("window %d was void: reports after window %d prove nothing", window, newest)
                return True
    return False
