"""A recorded run for tests of catch-up: random updates and every object that a network publishes about them."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deciding import publish_decision
from included import included_set

from tplr.comms import Comms
from tplr.compress.payload import parse
from tplr.exchange.aggregates import assemble
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.exchange.quorum import void as nothing
from tplr.hparams import HParams
from tplr.node.replica import NodeContext
from tplr.node.train_state import TrainState
from tplr.schemas import PeerList
from tplr.seeds import derive
from tplr.training.model import build_model
from tplr.training.schemes import outer_scheme


class Recording:
    """Records windows in the buckets of a leading validator and its miners.

    Attributes:
        window: the next one to record.
        train_state: with all windows before it applied.
        found: the updates of the last window, also of a void one.
    """

    def __init__(
        self,
        leader: Comms,
        miners: Sequence[Comms],
        hparams: HParams,
        *,
        start: int,
        folder: Path,
        others: Sequence[Comms] = (),
    ) -> None:
        """``folder``: for the leader's saved state; ``others``: electors that agree with the leader."""
        self._electors = (leader, *others)
        self.found: GatherResult | None = None
        self.start = self.window = start
        self._leader = leader
        self._miners = {comms.uid: comms for comms in miners}
        self._hparams = hparams
        self.train_state = TrainState(build_model(hparams), hparams, folder)
        self.train_state.start_window = start
        self._senders = {uid: outer_scheme(self.train_state.parameters, hparams) for uid in self._miners}

    async def begin(self) -> None:
        """Publish the start window, and a peer list of all miners."""
        uids = tuple(sorted(self._miners))
        peers = PeerList(
            peers=uids,
            reserve_peers=(),
            initial_selection=True,
            sync_window=self.start,
            first_effective_window=self.start,
        )
        for elector in self._electors:
            await elector.post_peer_list(peers)
            await elector.post_start_window(self.start)

    async def record(
        self,
        *,
        senders: int | None = None,
        updates: bool = True,
        included: bool = True,
        aggregate: bool = True,
        report: bool = True,
        void: bool = False,
        applied: int | None = None,
        voided: tuple[int, ...] = (),
        ends: Callable[[], Awaitable[None]] | None = None,
    ) -> GatherResult:
        """Record a window with updates of the first ``senders`` miners (default: all), and return the applied updates.

        Flags choose which objects of the window are published. In a ``void`` window updates are published, but none is
        applied. Only the first ``applied`` updates are applied, if given. ``voided`` are earlier windows that this
        window's decision voids. ``ends`` waits for the window's end; miners then commit before it.
        """
        window, step = self.window, self.train_state.global_step
        found = []
        for uid, sender in [*self._senders.items()][:senders]:
            tensors = self._random_tensors(uid)
            body = sender.pack(tensors, step=step, window=window, uid=uid, pages_digest="0" * 64, batches=1)
            update = parse(body, self.train_state.outer.spec, window=window, uid=uid)
            found.append(GatheredUpdate(uid, update, hashlib.sha256(body).hexdigest(), len(body)))
            if ends:
                await self._miners[uid].put_commit(window, found[-1].sha256)
        if ends:
            await ends()
        for one in found if updates else ():
            await self._miners[one.uid].put_update(window, one.update.body)
        gathered = GatherResult(window=window, updates=tuple(found[:applied]), skipped={}, published=True)
        self.found = gathered
        if void:
            gathered, aggregate = replace(gathered, updates=()), False
        published = included_set(gathered, self._hparams.version)
        if void:
            assert published == nothing(window, published.version).included
        if included:
            await publish_decision(self._electors, published, voided=voided)
        if aggregate:
            await self._leader.put_aggregate(
                published, assemble(published, [one.update.body for one in gathered.updates])
            )
        self.train_state.apply([one.update for one in gathered.updates])
        self.window = window + 1
        if report:
            await self.report(gathered)
        return gathered

    async def report(self, gathered: GatherResult) -> None:
        """Publish the electors' reports of the last window, in which ``gathered`` was applied."""
        block_hash = await self._leader.window_hash(gathered.window + 1)
        for elector in self._electors:
            await elector.put_report(self.train_state.report(gathered, uid=elector.uid, block_hash=block_hash))

    async def checkpoint(self, stateful: Mapping[str, object] | None = None) -> None:
        """Publish the leader's state as a checkpoint."""
        await self._leader.publish_checkpoint(self.train_state.save(self.window, stateful or {}).folder)

    def _random_tensors(self, uid: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(derive("made-up", uid, self.window) >> 1)
        return {name: torch.randn(one.shape, generator=generator) for name, one in self.train_state.parameters.items()}


@contextlib.asynccontextmanager
async def recorded_run(
    staged: Any, *, start: int, **constants: object
) -> AsyncIterator[tuple[Any, Recording, NodeContext, tuple[NodeContext, NodeContext]]]:
    """A stage of two miners and a validator with a manual clock, at the end of window ``start``; yields it with a
    recording, the leader's context, and those of the miners."""
    fixed = {
        "blocks_per_window": 4,
        "manifest_timeout_seconds": 0.1,
        "gradient_retention_windows": 10**6,
        "time_window_delta_seconds": 10,  # an upload may take as long, on a busy machine too
    }
    async with contextlib.AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(miners=2, by_hand=True, **fixed, **constants))
        leader, one, other = [await stage.context(stage.setup(name)) for name in ("validator", "miner-1", "miner-2")]
        nodes = (leader, one, other)
        await stack.enter_async_context(stage.running(*(node.clock.run() for node in nodes)))
        for node in nodes:
            await node.comms.refresh()
            await node.clock.wait_for_window(0)
        folder = stage.folder("recording")
        recording = Recording(leader.comms, [one.comms, other.comms], stage.hparams, start=start, folder=folder)
        while leader.clock.window <= start:
            await stage.pass_windows(1, *(node.clock for node in nodes))
        yield stage, recording, leader, (one, other)
