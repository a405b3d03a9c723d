"""The same small subnet on each implementation of ``Chain``, with access for its administrator."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import bittensor as bt
from bittensor_core import Keypair
from process_chain import ProcessChain, SharedClock
from subtensor_node import POLL_SECONDS, SubtensorNode

from tplr.chain.base import Chain
from tplr.chain.clocks import Clock, ManualClock
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.chain.rules import ChainLimits
from tplr.chain.subtensor import SubtensorChain

T = TypeVar("T")
# Short periods, so that a test crosses them in a few blocks.
LIMITS: dict[str, Any] = {
    "tempo": 20,
    "min_stake": 10.0,
    "min_allowed_weights": 1,
    "weights_rate_limit": 0,
    "commit_reveal": False,
    "immunity_period": 3,
}
NETUID = 1
COLDKEY = bt.sp_core.Keypair.create_from_uri("//cold").ss58_address


class ServersClock:
    """The clock of a node's machine: runs with the wall clock, but can be stopped and set forward."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._stopped: float | None = None

    def now(self) -> float:
        return (self._stopped or time.time()) + self._ahead

    def stop(self) -> None:
        self._stopped = time.time()

    def go_on(self) -> None:
        assert self._stopped is not None
        self._ahead -= time.time() - self._stopped
        self._stopped = None

    def skip(self, seconds: float) -> None:
        self._ahead += seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class World:
    """A subnet. Hotkeys have names; ``address`` gives their address on chain.

    Args:
        past: number of blocks that exist when it opens.
    """

    block_time = 0.25
    clock: Clock

    def __init__(self, folder: Path, *, finality_lag: int = 0, retained: int | None = None, **limits: Any) -> None:
        self.folder = folder
        self.finality_lag, self.retained = finality_lag, retained
        self.limits = ChainLimits(**(LIMITS | limits))
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> "World":
        await self.begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stack.aclose()

    async def begin(self) -> None:
        """Create the chain."""
        raise NotImplementedError

    async def open(self, name: str, *, archive: bool = False) -> Chain:
        """Open the chain as ``name``; it is closed with the world."""
        chain = await self._open(name, archive=archive)
        self.stack.push_async_callback(chain.close)
        return chain

    async def _open(self, name: str, *, archive: bool) -> Chain:
        raise NotImplementedError

    async def act(self, awaitable: Awaitable[T]) -> T:
        """Return the result of a call that takes blocks."""
        return await awaitable

    async def pass_blocks(self, number: int) -> int:
        """Let at least this number of blocks be made; returns the head."""
        goal = self.admin.look()[0] + number
        while True:
            head, due = self.admin.look()
            if head >= goal:
                return head
            self.skip(max(0.0, due - self.clock.now()))

    def skip(self, seconds: float) -> None:
        """Set the clock of all nodes of this chain forward."""
        raise NotImplementedError

    async def join(self, *names: str, **settings: Any) -> None:
        for name in names:
            self.admin.register(self.address(name), COLDKEY, **settings)
        await self.pass_blocks(1)

    def address(self, name: str) -> str:
        return self.hotkey(name).ss58_address

    def hotkey(self, name: str) -> Keypair:
        """Also creates the wallet, which contains only a hotkey, as on a miner's machine."""
        wallet = bt.Wallet(name, "default", str(self.folder / "wallets"))
        if not wallet.hotkey_file.exists_on_device():
            wallet.create_new_hotkey(use_password=False, suppress=True)
        return wallet.hotkey

    def _create(self, clock: Clock, *, finality_lag: int, retained: int | None, **limits: Any) -> None:
        path = self.folder / "chain.db"
        chosen = ChainLimits(**(vars(self.limits) | limits))
        Ledger.create(
            path,
            block_time=self.block_time,
            limits=chosen,
            clock=clock,
            finality_lag=finality_lag,
            retained_blocks=retained,
            stale_heads=0.0,
        )
        self.path, self.clock = path, clock
        self.admin = Ledger(path, clock=clock, archive=True)
        self.stack.callback(self.admin.close)


class ManualWorld(World):
    """``LocalChain`` in virtual time."""

    clock: ManualClock

    async def begin(self) -> None:
        self._create(ManualClock(), finality_lag=self.finality_lag, retained=self.retained)

    async def _open(self, name: str, *, archive: bool) -> Chain:
        return LocalChain(self.path, self.hotkey(name), clock=self.clock, archive=archive)

    async def act(self, awaitable: Awaitable[T]) -> T:
        return await self.clock.drive(awaitable, step=self.block_time)

    def skip(self, seconds: float) -> None:
        self.clock.advance(seconds)


class ProcessWorld(World):
    """``LocalChain`` in real time: the first one opened is in this process, all others are in separate processes."""

    clock: SharedClock

    async def begin(self) -> None:
        clock = SharedClock(self.folder / "ahead")
        self._create(clock, finality_lag=self.finality_lag, retained=self.retained)
        self._opened = 0

    def skip(self, seconds: float) -> None:
        self.clock.skip(seconds)

    async def _open(self, name: str, *, archive: bool) -> Chain:
        self._opened += 1
        if self._opened == 1:
            return LocalChain(self.path, self.hotkey(name), clock=self.clock, archive=archive)
        return await ProcessChain.open(self.path, self.hotkey(name), clock=self.clock, archive=archive)


class NodeWorld(World):
    """``SubtensorChain`` through the SDK, over websockets, at a test node."""

    block_time = 0.1
    clock: ServersClock

    async def begin(self) -> None:
        # The node has its own finality and state pruning. Sealed weights can't be opened: they stay sealed for ever.
        self._create(ServersClock(), finality_lag=0, retained=None, reveal_epochs=10**6)
        serve = SubtensorNode(self.admin, finality_lag=self.finality_lag, retained_blocks=self.retained)
        self.node = await self.stack.enter_async_context(serve)

    async def pass_blocks(self, number: int) -> int:
        head = await super().pass_blocks(number)
        # The node looks for new heads a little later.
        await asyncio.sleep(2 * POLL_SECONDS)
        return head

    def skip(self, seconds: float) -> None:
        self.clock.skip(seconds)

    async def second_node(self) -> SubtensorNode:
        """Another node of the same chain, which keeps all state."""
        return await self.stack.enter_async_context(SubtensorNode(self.admin, finality_lag=self.finality_lag))

    async def _open(self, name: str, *, archive: bool) -> Chain:
        archives = [(await self.second_node()).url] if archive else []
        return await self.connect(name, self.node.url, archive=archives)

    async def connect(
        self, name: str, url: str, *, archive: list[str] | None = None, genesis: str | None = None
    ) -> SubtensorChain:
        self.address(name)
        where = {"wallet_path": self.folder / "wallets", "wallet_name": name, "hotkey": "default"}
        chain = await SubtensorChain.open(url, netuid=NETUID, archive=archive or (), genesis=genesis, **where)
        # The metadata and the runtime have 0.25 s, but tests need not wait that long.
        assert chain.block_time == 0.25
        chain.block_time = self.block_time
        return chain


WORLDS: dict[str, type[World]] = {"manual": ManualWorld, "processes": ProcessWorld, "node": NodeWorld}
