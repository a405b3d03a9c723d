"""A node that catches up with a recorded run of two miners, in real buckets and on a real chain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from recording import Recording

from tplr.exchange.gather import GatherResult
from tplr.node.replica import NodeContext, Replica
from tplr.training.fingerprint import digest

START = 3


class CatchUp:
    """A recorded run of two miners, and a newcomer."""

    def __init__(
        self,
        stage: Any,
        recording: Recording,
        leader: NodeContext,
        newcomer: NodeContext,
        miners: tuple[NodeContext, ...],
    ) -> None:
        self.miners = miners
        self.stage = stage
        self.recording = recording
        self.leader = leader
        self.newcomer = newcomer

    async def record(self, windows: int = 1, **what: Any) -> GatherResult:
        for _ in range(windows):
            if self.newcomer.clock.window <= self.recording.window:
                await self.stage.pass_windows(1, self.newcomer.clock, self.leader.clock)
            # A window's hash is known once its first block is final.
            recorded = await self.stage.drive(self.recording.record(**what))
        return recorded

    async def forget_updates(self) -> None:
        for miner in self.miners:
            for info in await miner.comms.own_store.list("gradient-"):
                await miner.comms.own_store.delete(info.key)

    @contextlib.asynccontextmanager
    async def opened(self, **parts: Any) -> AsyncIterator[Replica]:
        """Open the newcomer, with these parts of its state."""
        async with self._opened("miner-3", self.newcomer, parts) as replica:
            yield replica

    @contextlib.asynccontextmanager
    async def opened_elector(self, **parts: Any) -> AsyncIterator[Replica]:
        """Open the leading validator, with these parts of its state."""
        async with self._opened("validator", self.leader, parts) as elector:
            yield elector

    @contextlib.asynccontextmanager
    async def _opened(self, name: str, context: NodeContext, parts: dict[str, Any]) -> AsyncIterator[Replica]:
        async with self.stage.replica(self.stage.setup(name), context) as replica:
            for one, part in parts.items():
                replica.register(one, part)
            await self.stage.drive(replica.open(START))
            yield replica

    async def advance(self, replica: Replica, until: int | None = None) -> None:
        await self.stage.drive(replica.advance(until=self.recording.window if until is None else until))

    async def skip_lost(self, replica: Replica) -> None:
        """Advance from a lost window to a checkpoint, which is published when the node has reported the loss."""
        lost = replica.window
        ahead = asyncio.create_task(self.advance(replica))
        await self.stage.until(lambda: self.events_of("problem"))
        assert replica.window == lost
        await self.recording.checkpoint()
        await self.record()
        await ahead

    async def apply_first(self, replica: Replica, recorded: GatherResult) -> None:
        """Apply a window's first update alone, as a node that found no other while no set was published."""
        await replica.gather()
        alone = GatherResult(window=recorded.window, updates=recorded.updates[:1], skipped={})
        await self.stage.drive(replica.apply(alone))

    def agrees(self, replica: Replica) -> bool:
        mine, recorded = replica.train_state, self.recording.train_state
        where = (replica.window, mine.global_step) == (self.recording.window, recorded.global_step)
        return where and digest(mine.parameters) == digest(recorded.parameters)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return self.stage.of(kind, "miner-3")


OpenCatchUp = Callable[..., contextlib.AbstractAsyncContextManager[CatchUp]]


@contextlib.asynccontextmanager
async def open_catch_up(staged: Any, scheme: str = "demo", **constants: Any) -> AsyncIterator[CatchUp]:
    """Open a stage, and start a run on it that has recorded no window yet."""
    usual = {"blocks_per_window": 4, "manifest_timeout_seconds": 0.1, "checkpoint_frequency": 2}
    # The test advances time, so nothing becomes too old on a slow machine.
    constants = usual | {"gradient_retention_windows": 10**6} | constants
    async with staged(miners=3, scheme=scheme, by_hand=True, **constants) as stage:
        names = ("validator", "miner-1", "miner-2", "miner-3")
        leader, one, other, newcomer = [await stage.context(stage.setup(name)) for name in names]
        nodes = (leader, one, other, newcomer)
        async with stage.running(*(node.clock.run() for node in nodes)):
            for node in nodes:
                await node.comms.refresh()
                await node.clock.wait_for_window(0)
            folder = stage.folder("recording")
            recording = Recording(leader.comms, [one.comms, other.comms], stage.hparams, start=START, folder=folder)
            while newcomer.clock.window <= START:
                await stage.pass_windows(1, *(node.clock for node in nodes))
            await recording.begin()
            yield CatchUp(stage, recording, leader, newcomer, (one, other))
