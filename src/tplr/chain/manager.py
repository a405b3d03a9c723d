"""``ChainManager``: a cached directory of the chain, window times, and two writes with safe retries."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import TypeVar

from tplr.chain.base import Block, Chain, Commitment, Metagraph
from tplr.chain.commitment import decode_commitment, encode_commitment
from tplr.chain.electors import Electors, electors_of
from tplr.clock import WindowClock, block_to_window, first_block
from tplr.errors import ChainError, ChainUnavailable, NotRegistered, RateLimited
from tplr.schemas import Bucket, UploadBounds
from tplr.seeds import derive

logger = logging.getLogger(__name__)

# Number of windows whose first block and directory are cached; final blocks never change.
REMEMBERED_WINDOWS = 64
WRITE_ATTEMPTS = 5

T = TypeVar("T")
# Number of blocks after which a block is expected to be final.
FINAL_AFTER_BLOCKS = 10
# Number of blocks after which a write with unknown outcome has been included or is lost.
INCLUSION_BLOCKS = 3


class ChainManager:
    """The subnet's neurons and buckets as of the last ``refresh``. The constructor does no I/O.

    Args:
        fetch_interval: seconds between refreshes in ``run_refresh``.
        retry_interval: seconds before the first retry, doubled with every failure; default: one block.
        elector_share: share of the validators' stake that makes a validator an elector; as in ``electors_of``.

    Attributes:
        commitments: buckets by uid, as of the last refresh.
        clock: blocks and windows; ``clock.run()`` belongs in the node's task group.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        blocks_per_window: int,
        fetch_interval: float = 600.0,
        retry_interval: float | None = None,
        elector_share: float = 0.05,
    ) -> None:
        self.chain = chain
        self.blocks_per_window = blocks_per_window
        self.fetch_interval = fetch_interval
        self.retry_interval = chain.block_time if retry_interval is None else retry_interval
        self.commitments: dict[int, Bucket] = {}
        self.clock = WindowClock(chain.blocks, blocks_per_window=blocks_per_window, block_time=chain.block_time)
        self._metagraph: Metagraph | None = None
        self._refused: dict[str, int] = {}
        self._first_blocks: dict[int, Block] = {}
        self._directories: dict[int, tuple[Metagraph, dict[int, Bucket]]] = {}
        self._elector_share = elector_share
        self._finality_stalled = False

    # The directory

    @property
    def hotkey(self) -> str:
        """This node's own hotkey."""
        return self.chain.hotkey

    @property
    def metagraph(self) -> Metagraph:
        """The metagraph as of the last refresh. Raises ``ChainUnavailable`` before the first one."""
        if self._metagraph is None:
            raise ChainUnavailable("the metagraph has not been read yet: await refresh() first")
        return self._metagraph

    @property
    def uid(self) -> int:
        """This node's own uid. Raises ``NotRegistered`` if it has none."""
        uid = self.metagraph.uid_of(self.hotkey)
        if uid is None:
            raise NotRegistered(
                f"hotkey {self.hotkey} has no uid on subnet {self.chain.netuid} at block {self.metagraph.block}: "
                "register it, or check --wallet.hotkey and --netuid"
            )
        return uid

    def get_bucket(self, uid: int) -> Bucket | None:
        """Return the bucket that ``uid`` committed, or None without a valid one."""
        return self.commitments.get(uid)

    def get_hotkey(self, uid: int) -> str | None:
        """Return the hotkey that holds ``uid``, or None."""
        return next((neuron.hotkey for neuron in self.metagraph.neurons if neuron.uid == uid), None)

    def get_all_buckets(self) -> dict[int, Bucket]:
        """Return all valid buckets by uid, ascending."""
        return dict(self.commitments)

    async def get_commitments(self) -> dict[int, Bucket]:
        """Read all valid buckets by uid from the chain now. Raises as ``refresh``."""
        await self.refresh()
        return self.get_all_buckets()

    async def get_commitment(self, uid: int) -> Bucket | None:
        """Read the bucket that ``uid`` committed from the chain now. Raises as ``refresh``."""
        return (await self.get_commitments()).get(uid)

    async def get_bucket_for_neuron(self, hotkey: str | None = None) -> Bucket | None:
        """Read the bucket that ``hotkey`` (default: this node's), registered or not, committed, from the chain now.

        Raises:
            ChainUnavailable: the chain does not answer.
            ValueError: its commitment does not contain a bucket.
        """
        hotkey = hotkey or self.hotkey
        commitment = (await self.chain.commitments([hotkey])).get(hotkey)
        return None if commitment is None else decode_commitment(commitment.data)

    def validators(self) -> list[int]:
        """Return the permit holders with a valid bucket, by descending stake, then ascending uid."""
        able = [neuron for neuron in self.metagraph.neurons if neuron.permit and neuron.uid in self.commitments]
        return [neuron.uid for neuron in sorted(able, key=lambda neuron: (-neuron.stake, neuron.uid))]

    def highest_stake_validator(self) -> int | None:
        """Return the leading validator, the first of ``validators``, or None."""
        return next(iter(self.validators()), None)

    async def refresh(self) -> None:
        """Read metagraph and commitments of one block; values of a later block, if there are any, are kept.

        Raises:
            ChainUnavailable: the previous values are kept.
        """
        metagraph, buckets = await self._directory(None)
        # Another refresh may have been faster, and a node of the chain may lag.
        if self._metagraph is None or metagraph.block >= self._metagraph.block:
            self._metagraph, self.commitments = metagraph, buckets

    async def buckets_in(self, window: int) -> dict[int, Bucket]:
        """Return the buckets by uid at the end of ``window``, which are equal for every node at any time.

        Raises:
            ChainUnavailable: the window has not ended, or the chain does not answer; named ``StateDiscarded`` if it
                ended too long ago for an ordinary node.
        """
        _, buckets = await self._directory_at(window + 1)
        return buckets

    async def hotkeys_in(self, window: int) -> dict[int, str]:
        """Return the hotkeys by uid at the end of ``window``. Raises as ``buckets_in``."""
        return {neuron.uid: neuron.hotkey for neuron in (await self.metagraph_in(window)).neurons}

    async def metagraph_in(self, window: int) -> Metagraph:
        """Return the metagraph at the end of ``window``. Raises as ``buckets_in``."""
        metagraph, _ = await self._directory_at(window + 1)
        return metagraph

    async def electors_in(self, window: int) -> Electors:
        """Return the electors of ``window``, as of its first block, which are equal for every node at any time.

        If the chain node has dropped the state of that window, the present electors are returned instead.

        Raises:
            ChainUnavailable: the window has not begun, or the chain does not answer.
        """
        try:
            metagraph, buckets = await self._directory_at(window)
        except ChainUnavailable as error:
            if error.name != "StateDiscarded":
                raise
            logger.warning("electors of window %d unknown, using the present ones: %s", window, error)
            return self.electors
        return electors_of(metagraph, buckets, self._elector_share)

    @property
    def electors(self) -> Electors:
        """The electors as of the last refresh. Raises ``ChainUnavailable`` before the first one."""
        return electors_of(self.metagraph, self.commitments, self._elector_share)

    async def _directory_at(self, window: int) -> tuple[Metagraph, dict[int, Bucket]]:
        """Return metagraph and buckets at the first block of ``window``, cached. Raises as ``window_start``."""
        if window not in self._directories:
            block = await self.window_start(window)
            _remember(self._directories, window, await self._directory(block.number))
        return self._directories[window]

    async def _directory(self, block: int | None) -> tuple[Metagraph, dict[int, Bucket]]:
        """Read metagraph and buckets at ``block`` (default: head)."""
        metagraph = await self.chain.metagraph(block)
        if not metagraph.neurons:
            raise ChainUnavailable(
                f"subnet {self.chain.netuid} has no neurons at block {metagraph.block}: ignoring this answer"
            )
        # Commitments remain after a registration ends, so use only those of neurons registered at that block.
        committed = await self.chain.commitments([neuron.hotkey for neuron in metagraph.neurons], metagraph.block)
        buckets = {
            neuron.uid: bucket
            for neuron in metagraph.neurons
            if (bucket := self._bucket_of(neuron.uid, committed.get(neuron.hotkey))) is not None
        }
        return metagraph, buckets

    async def run_refresh(self) -> None:
        """Refresh until cancelled, in the node's task group. Errors of the chain are logged and retried."""
        pause = self.retry_interval
        while True:
            try:
                await self.refresh()
            except ChainError as error:
                wait = max(pause, error.retry_after) if isinstance(error, ChainUnavailable) else pause
                logger.warning("metagraph and commitments not refreshed, next try in %.1f s: %s", wait, error)
                await asyncio.sleep(wait)
                pause = min(2 * pause, max(self.retry_interval, self.fetch_interval))
            else:
                pause = self.retry_interval
                await asyncio.sleep(self.fetch_interval)

    def _bucket_of(self, uid: int, commitment: Commitment | None) -> Bucket | None:
        if commitment is None:
            return None
        try:
            return decode_commitment(commitment.data)
        except ValueError as error:
            if self._refused.get(commitment.hotkey, -1) < commitment.block:
                self._refused[commitment.hotkey] = commitment.block
                logger.warning("commitment of uid %d (%s) is not a bucket: %s", uid, commitment.hotkey, error)
            return None

    # Windows

    def block_to_window(self, block: int) -> int:
        """Return the window that ``block`` belongs to."""
        return block_to_window(block, self.blocks_per_window)

    async def window_now(self) -> int:
        """Return the window of the chain's newest block. Raises ``ChainUnavailable``."""
        return self.block_to_window(await self.chain.head())

    async def window_start(self, window: int) -> Block:
        """Return the first block of ``window``. If the window has just begun, wait until that block is final.

        Raises:
            ChainUnavailable: the window has not begun, or began too long ago for an ordinary node.
        """
        if window in self._first_blocks:
            return self._first_blocks[window]
        block = await self._final_block(first_block(window, self.blocks_per_window))
        _remember(self._first_blocks, window, block)
        return block

    async def window_hash(self, window: int) -> str:
        """Return the hash of the window's first block, equal on all nodes. Raises as ``window_start``."""
        return (await self.window_start(window)).hash

    async def window_to_seed(self, window: int) -> int:
        """Return 64 random bits, equal on all nodes, unknown before the window begins. Raises as ``window_start``."""
        return derive("window", await self.window_hash(window))

    async def upload_bounds(self, window: int, delta_seconds: float) -> UploadBounds:
        """Return the time bounds of the updates of ``window``, by the chain's time.

        They begin with the next window's first block and last ``delta_seconds``.

        Raises:
            ChainUnavailable: the window has not ended, or the chain does not answer.
        """
        start = (await self.window_start(window + 1)).time
        return UploadBounds(start=start, end=start + delta_seconds)

    async def _final_block(self, number: int) -> Block:
        try:
            return await self.chain.block(number)
        except ChainUnavailable as error:
            if not self._is_coming(number, error, head=-1):
                raise
        async with aclosing(self.chain.blocks()) as blocks:
            async for head in blocks:
                try:
                    block = await self.chain.block(number)
                except ChainUnavailable as error:
                    if not self._is_coming(number, error, head):
                        raise
                    self._report_finality(number, head, final=False)
                else:
                    self._report_finality(number, head, final=True)
                    return block
        raise ChainUnavailable("the stream of blocks ended")

    def _report_finality(self, number: int, head: int, *, final: bool) -> None:
        """Log that finality has stalled, or has resumed, once for all that wait; ``head``: the newest block."""
        late = head - number
        seconds = late * self.chain.block_time
        if final and self._finality_stalled:
            logger.info("block %d is final, %d blocks (%.0f s) after it", number, late, seconds)
            self._finality_stalled = False
        elif not final and not self._finality_stalled and late >= FINAL_AFTER_BLOCKS:
            logger.warning(
                "block %d is not final yet, %d blocks (%.0f s) after it: everything that needs it waits",
                number,
                late,
                seconds,
            )
            self._finality_stalled = True

    def _is_coming(self, number: int, error: ChainUnavailable, head: int) -> bool:
        """Whether a block exists, but is not final yet, or not known to an endpoint that is behind the clock.

        Args:
            head: the endpoint's newest block, -1 if it is unknown. An endpoint at ``number`` that does not know the
                block will never have it.
        """
        behind = head < number and self.clock.has_seen(number)
        return error.name == "NotFinal" or (error.name == "UnknownBlock" and behind)

    # Writes

    async def try_commit(self, bucket: Bucket) -> bool:
        """Commit ``bucket`` as this hotkey's bucket; return whether a write was needed.

        It reads before every attempt and after the last one. So it finds a write with unknown outcome, and does not
        write an existing commitment again.

        Raises:
            ValueError: a commitment can't express the bucket.
            ChainUnavailable: the outcome is still unknown after some attempts.
            NotRegistered, RateLimited: the chain refused.
        """
        wanted = encode_commitment(bucket)
        written = False
        pause = self.retry_interval
        for attempt in range(1, WRITE_ATTEMPTS + 1):
            try:
                if await self._committed() == wanted:
                    return written
                written = True
                block = await self.chain.commit(wanted)
                if await self._committed(block) == wanted:
                    return written
                # The commit was included, but the chain has another value: another process writes for this hotkey.
                logger.warning("the commitment on chain differs from the one made in block %d", block)
            except ChainUnavailable as error:
                logger.warning("commitment not confirmed (attempt %d of %d): %s", attempt, WRITE_ATTEMPTS, error)
                await self._wait_for_inclusion(error)
            await asyncio.sleep(pause)
            pause *= 2
        if await self._committed() == wanted:
            return written
        raise ChainUnavailable(
            f"the bucket commitment is not on chain after {WRITE_ATTEMPTS} attempts: check the endpoint, and that no "
            "other process commits with this hotkey",
            fate_unknown=written,
        )

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        """Set weights and return the block; before a retry, check whether the last write took effect.

        Raises:
            ChainUnavailable: the outcome is still unknown after some attempts.
            NotRegistered, NotPermitted, RateLimited, Rejected: the chain refused; a retry can't help.
        """
        pause = self.retry_interval
        before: int | None = None
        for attempt in range(1, WRITE_ATTEMPTS + 1):
            try:
                updated = await self._last_update()
                if before is not None and updated > before:
                    return updated
                before = max(updated, before or 0)  # an endpoint that lags says an older one
                return await self.chain.set_weights(weights)
            except RateLimited:
                # The previous attempt may have been included after all.
                if attempt > 1 and before is not None and (updated := await self._last_update()) > before:
                    return updated
                raise
            except ChainUnavailable as error:
                logger.warning("weights not set (attempt %d of %d): %s", attempt, WRITE_ATTEMPTS, error)
                if attempt == WRITE_ATTEMPTS:
                    raise
                await self._wait_for_inclusion(error)
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _wait_for_inclusion(self, error: ChainUnavailable) -> None:
        """After a write with unknown outcome, wait until it has been included or is lost; and for as long as asked."""
        await asyncio.sleep(error.retry_after)
        if not error.fate_unknown:
            return
        async with aclosing(self.chain.blocks()) as blocks:
            first = await anext(blocks)
            async for number in blocks:
                if number >= first + INCLUSION_BLOCKS:
                    return

    async def _committed(self, block: int | None = None) -> str | None:
        commitment = (await self.chain.commitments([self.hotkey], block)).get(self.hotkey)
        return None if commitment is None else commitment.data

    async def _last_update(self) -> int:
        neuron = (await self.chain.metagraph()).by_hotkey().get(self.hotkey)
        if neuron is None:
            raise NotRegistered(f"hotkey {self.hotkey} has no uid on subnet {self.chain.netuid}: register it")
        return neuron.last_update


def _remember(by_window: dict[int, T], window: int, value: T) -> None:
    """Cache ``value``, and drop the oldest entry if the cache is full."""
    by_window[window] = value
    if len(by_window) > REMEMBERED_WINDOWS:
        del by_window[next(iter(by_window))]
