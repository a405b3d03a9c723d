"""``Chain`` on one SQLite file, for localnet and tests: no server and no SDK."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from bittensor_core import Keypair

from tplr.chain import hotkeys, rules
from tplr.chain.base import Block, Commitment, Metagraph
from tplr.chain.clocks import Clock, WallClock
from tplr.chain.ledger import Kind, Ledger
from tplr.errors import ChainUnavailable, ConfigError
from tplr.seeds import derive

logger = logging.getLogger(__name__)


class LocalChain:
    """One hotkey's access to a chain file; see ``ledger.py`` for its rules and for the administrator's calls.

    The constructor opens the file, which takes a millisecond; use ``async with``, or ``close``. Do not fork while it is
    open. Cancelling a write does not withdraw it, as on any chain.

    Args:
        hotkey: a key pair, or only an address, which cannot sign.
        netuid: must equal the file's; None accepts any.
        archive: also read the state that ordinary nodes have dropped.
    """

    def __init__(
        self,
        path: str | Path,
        hotkey: Keypair | str,
        *,
        netuid: int | None = None,
        clock: Clock | None = None,
        archive: bool = False,
    ) -> None:
        self._keypair = None if isinstance(hotkey, str) else hotkey
        self.hotkey = hotkey if isinstance(hotkey, str) else hotkey.ss58_address
        self._clock = clock or WallClock()
        self._ledger = Ledger(path, clock=self._clock, archive=archive)
        self.genesis = self._ledger.genesis_hash
        self.netuid = self._ledger.genesis.netuid
        self.block_time = self._ledger.genesis.block_time
        # One write at a time for each hotkey: each waits for its block.
        self._writing = asyncio.Lock()
        self._asked = 0
        if netuid is not None and netuid != self.netuid:
            self._ledger.close()
            raise ConfigError(f"chain file {path} holds subnet {self.netuid}, not {netuid}: set --netuid {self.netuid}")

    async def head(self) -> int:
        number, _ = await asyncio.to_thread(self._ledger.look)
        genesis = self._ledger.genesis
        self._asked += 1
        # The best block may be replaced by a branch that is shorter for a moment; state is always the newest block's.
        stale = derive("stale-head", genesis.seed, self._asked) / 2**64 < genesis.stale_heads
        return max(0, number - stale)

    async def blocks(self) -> AsyncGenerator[int, None]:
        last: int | None = None
        while True:
            try:
                head, due = await asyncio.to_thread(self._ledger.look)
            except ChainUnavailable as error:
                logger.warning("no blocks: %s", error)
                await self._clock.sleep(self.block_time)
                continue
            for number in range(head if last is None else last + 1, head + 1):
                yield number
            last = head
            await self._until(due)

    async def block(self, number: int) -> Block:
        return await asyncio.to_thread(self._ledger.block, number)

    async def metagraph(self, block: int | None = None) -> Metagraph:
        return await asyncio.to_thread(self._ledger.metagraph, block)

    async def commitments(self, hotkeys: Collection[str], block: int | None = None) -> dict[str, Commitment]:
        found = await asyncio.to_thread(self._ledger.commitments, block)
        return {hotkey: commitment for hotkey, commitment in found.items() if hotkey in hotkeys}

    async def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        return await asyncio.to_thread(self._ledger.weights, block)

    async def max_weight(self) -> float:
        return (await asyncio.to_thread(self._ledger.limits)).max_weight / rules.U16_MAX

    async def commit(self, data: str) -> int:
        rules.check_commitment_size(data.encode())
        return await self._write("commit", data)

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        rules.quantize_weights(weights)  # raises for weights that can't be capped
        positive = {uid: weight for uid, weight in weights.items() if weight > 0}
        return await self._write("weights", rules.quantize_weights(rules.capped(positive, await self.max_weight())))

    def sign(self, message: bytes) -> bytes:
        if self._keypair is None:
            raise ConfigError(f"hotkey {self.hotkey!r} was opened without its key and can't sign: give the key")
        return hotkeys.sign(self._keypair, message)

    async def close(self) -> None:
        await asyncio.to_thread(self._ledger.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _write(self, kind: Kind, payload: str | Sequence[tuple[int, int]]) -> int:
        async with self._writing:
            call = await asyncio.to_thread(self._ledger.submit, self.hotkey, kind, payload)
            try:
                while (receipt := await asyncio.to_thread(self._ledger.receipt, call)) is None:
                    _, due = await asyncio.to_thread(self._ledger.look)
                    await self._until(due)
            except ChainUnavailable as error:
                raise ChainUnavailable(f"{kind} was sent, its result is unknown: {error}", fate_unknown=True) from error
        if receipt.error is not None:
            raise receipt.error
        return receipt.block

    async def _until(self, due: float) -> None:
        # Sleep for at most one block, because the machine's clock may be set back.
        await self._clock.sleep(min(due - self._clock.now(), self.block_time))
