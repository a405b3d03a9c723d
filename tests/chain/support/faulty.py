"""``FaultyChain``: a chain with scripted faults."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping
from contextlib import aclosing
from typing import Literal, TypeVar

from tplr.chain.base import Block, Chain, Commitment, Metagraph
from tplr.errors import ChainUnavailable
from tplr.seeds import derive

T = TypeVar("T")
# lost:     fails before anything was sent
# vanished: was sent, never takes effect, and no error is reported
# landed:   has its effect, but the answer is lost
# late:     as ``landed``, and the caller gets its error long before
Fault = Literal["lost", "vanished", "landed", "late"]
# Long enough to send a call, but shorter than a block.
SENT_SECONDS = 0.05


class FaultyChain:
    """Implements ``Chain`` by calls to ``chain``.

    Args:
        rate: fraction of all calls that are lost, chosen by ``seed``.

    Attributes:
        calls: names of the calls made, in order.
        silent: while set, ``blocks`` yields nothing; held-back numbers come with the next block.
        lag: blocks by which ``head``, ``blocks`` and ``block`` are behind the true head.
    """

    def __init__(self, chain: Chain, *, seed: int = 0, rate: float = 0.0) -> None:
        self.genesis, self.netuid, self.hotkey = chain.genesis, chain.netuid, chain.hotkey
        self.block_time = chain.block_time
        self.calls: list[str] = []
        self.silent = False
        self.lag = 0
        self._chain = chain
        self._seed, self._rate = seed, rate
        self._faults: dict[str, list[Fault]] = {}

    def fail(self, call: str, *faults: Fault) -> None:
        """Script one fault for each of the next calls of that name, in this order."""
        self._faults.setdefault(call, []).extend(faults)

    async def head(self) -> int:
        return max(0, await self._call("head", self._chain.head()) - self.lag)

    async def blocks(self) -> AsyncGenerator[int, None]:
        held: list[int] = []
        async with aclosing(self._chain.blocks()) as numbers:
            async for number in numbers:
                held.append(number)
                while held and not self.silent:
                    yield max(0, held.pop(0) - self.lag)

    async def block(self, number: int) -> Block:
        if self.lag and number > (head := await self.head()):
            raise ChainUnavailable(f"there is no block {number}; the head is {head}", name="UnknownBlock")
        return await self._call("block", self._chain.block(number))

    async def metagraph(self, block: int | None = None) -> Metagraph:
        return await self._call("metagraph", self._chain.metagraph(block))

    async def commitments(self, hotkeys: Collection[str], block: int | None = None) -> dict[str, Commitment]:
        return await self._call("commitments", self._chain.commitments(hotkeys, block))

    async def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        return await self._call("weights", self._chain.weights(block))

    async def max_weight(self) -> float:
        return await self._call("max_weight", self._chain.max_weight())

    async def commit(self, data: str) -> int:
        return await self._call("commit", self._chain.commit(data))

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        return await self._call("set_weights", self._chain.set_weights(weights))

    def sign(self, message: bytes) -> bytes:
        return self._chain.sign(message)

    async def close(self) -> None:
        await self._chain.close()

    async def _call(self, name: str, call: Awaitable[T]) -> T:
        self.calls.append(name)
        waiting = self._faults.get(name)
        fault = waiting.pop(0) if waiting else None
        if fault is None and derive("fault", self._seed, len(self.calls)) / 2**64 < self._rate:
            fault = "lost"
        task = asyncio.ensure_future(call)
        if fault in ("lost", "vanished"):
            # A task that is cancelled before its first step does nothing.
            task.cancel()
            raise ChainUnavailable(f"{name}: no answer", fate_unknown=fault == "vanished")
        if fault == "late":
            await asyncio.wait({task}, timeout=SENT_SECONDS)
            task.cancel()
            raise ChainUnavailable(f"{name}: no answer", fate_unknown=True)
        result = await task
        if fault == "landed":
            raise ChainUnavailable(f"{name}: no answer", fate_unknown=True)
        return result
