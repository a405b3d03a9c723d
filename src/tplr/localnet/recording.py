"""A run that took no time: made-up updates, and all that a network leaves behind of them, for who is to catch up."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tplr.comms import Comms
from tplr.compress.payload import parse
from tplr.exchange.aggregates import bundle, included_set
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.hparams import HParams
from tplr.node.train_state import TrainState
from tplr.schemas import DebugReport, PeerList
from tplr.seeds import derive, fingerprint_seed
from tplr.training.fingerprint import digest, fingerprint
from tplr.training.model import build_model
from tplr.training.schemes import outer_scheme


class Recording:
    """Writes window after window into the buckets of a leading validator and of its miners.

    Attributes:
        window: the next one to record.
        parameters: of the model that holds all before it.
    """

    def __init__(self, leader: Comms, miners: Sequence[Comms], hparams: HParams, *, start: int, folder: Path) -> None:
        """``folder`` is for the leader's saved state."""
        self.start = self.window = start
        self._leader = leader
        self._miners = {comms.uid: comms for comms in miners}
        self._hparams = hparams
        self._train_state = TrainState(build_model(hparams), hparams, folder)
        self._train_state.start_window = start
        self.parameters = self._train_state.parameters
        self._senders = {uid: outer_scheme(self.parameters, hparams) for uid in self._miners}

    @property
    def step(self) -> int:
        """Outer steps recorded."""
        return self._train_state.global_step

    async def begin(self) -> None:
        """Publish where the run starts, and a peer list of all miners."""
        uids = tuple(sorted(self._miners))
        peers = PeerList(
            peers=uids,
            reserve_peers=(),
            initial_selection=True,
            sync_window=self.start,
            first_effective_window=self.start,
        )
        await self._leader.post_peer_list(peers)
        await self._leader.post_start_window(self.start)

    async def record(
        self,
        *,
        senders: int | None = None,
        updates: bool = True,
        included: bool = True,
        aggregate: bool = True,
        report: bool = True,
    ) -> GatherResult:
        """One more window, of the first ``senders`` miners or all; what is not wanted of it is not published. Returns
        what was applied."""
        window, step = self.window, self.step
        found = []
        for uid, sender in [*self._senders.items()][:senders]:
            body = sender.pack(self._made_up(uid), step=step, window=window, uid=uid, pages_digest="0" * 64, batches=1)
            update = parse(body, self._train_state.outer.spec, window=window, uid=uid)
            found.append(GatheredUpdate(uid, update, hashlib.sha256(body).hexdigest(), len(body)))
            if updates:
                await self._miners[uid].put_update(window, body)
        gathered = GatherResult(window=window, updates=tuple(found), skipped={}, published=True)
        published = included_set(gathered, self._hparams.version)
        if included:
            await self._leader.put_included(published)
        if aggregate:
            await self._leader.put_aggregate(published, bundle(published, [one.update.body for one in found]))
        self._train_state.apply([one.update for one in found])
        self.window = window + 1
        if report:
            await self.report(gathered)
        return gathered

    async def report(self, gathered: GatherResult) -> None:
        """Publish what the leader holds after the last window, of which ``gathered`` was applied."""
        await self._leader.put_report(await self._report(gathered))

    async def checkpoint(self, parts: Mapping[str, object] | None = None) -> None:
        """Publish what the leader holds now."""
        await self._leader.save_checkpoint(self._train_state.save(self.window, parts or {}).folder)

    async def _report(self, gathered: GatherResult) -> DebugReport:
        block_hash = await self._leader.window_hash(gathered.window + 1)
        seed = fingerprint_seed(window=gathered.window, block_hash=block_hash)
        found = fingerprint(self.parameters, step=self.step, seed=seed, samples=self._hparams.fingerprint_samples)
        return DebugReport(
            window=gathered.window,
            uid=self._leader.uid,
            fingerprint=found,
            proof=found,
            digest=digest(self.parameters),
            included={str(one.uid): one.sha256 for one in gathered.updates},
            skipped={},
        )

    def _made_up(self, uid: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(derive("made-up", uid, self.window) >> 1)
        return {name: torch.randn(one.shape, generator=draw) for name, one in self.parameters.items()}
