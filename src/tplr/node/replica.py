"""The model of a node and how it moves: gather a window, apply it, fingerprint, save. Live and replay alike."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import LlamaForCausalLM

from tplr.clock import WindowClock
from tplr.comms import Comms
from tplr.compress.payload import Update, parse
from tplr.errors import ChainUnavailable, PayloadError, StateError, StoreError
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.logging import in_window, logger
from tplr.node.state import SavedState, StateFolder
from tplr.schemas import DebugReport, Reason
from tplr.seeds import fingerprint_seed, proof_seed
from tplr.telemetry import Telemetry
from tplr.training.fingerprint import digest, fingerprint
from tplr.training.local import LocalTraining
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import local_training, outer_scheme

STATE_FORMAT = 2  # of what is saved; what another one wrote is passed over
RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Borders:
    """What a node speaks with: the others, the clock, and whoever listens."""

    comms: Comms
    clock: WindowClock
    telemetry: Telemetry


class Part(Protocol):
    """State of a role that is saved with the model; plain JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Replica:
    """A model that holds all windows before ``window``.

    ``advance`` is the only way forward, whether the window ended just now or while this node was away.
    """

    def __init__(
        self, model: LlamaForCausalLM, hparams: HParams, borders: Borders, folder: Path, *, every_peer: bool = False
    ) -> None:
        """``every_peer`` gathers from all buckets on chain instead of from the peer list."""
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.outer: OuterScheme = outer_scheme(self.parameters, hparams)
        self.local: LocalTraining = local_training(self.parameters, hparams)
        self.window = -1
        self.start_window = -1
        self._hparams = hparams
        self._borders = borders
        self._folder = StateFolder(folder)
        self._every_peer = every_peer
        self._parts: dict[str, Part] = {}

    @property
    def step(self) -> int:
        """Outer steps applied: the position of every schedule."""
        return self.window - self.start_window

    def keep(self, name: str, part: Part) -> None:
        """Save ``part`` with the model, and restore it in ``open``."""
        self._parts[name] = part

    async def open(self, start_window: int) -> None:
        """Go on from this node's saved state if it belongs to this run, else from the run's first weights."""
        self.window = self.start_window = start_window
        saved = await asyncio.to_thread(self._folder.load)
        if saved is None:
            return
        if saved.values.get("run") != self._run:
            logger.warning(
                "saved state is of another run (%s), this is %s: starting anew", saved.values.get("run"), self._run
            )
            return
        await asyncio.to_thread(self._restore, saved)
        logger.info("going on from saved state: next window to apply is %d", self.window)

    @property
    def _run(self) -> dict[str, Any]:
        # All that the model's bytes follow from, before any update is applied; and how they were saved.
        return {
            "format": STATE_FORMAT,
            "version": self._hparams.version,
            "start_window": self.start_window,
            "init_seed": self._hparams.init_seed,
            "layout": self.outer.spec.layout,
        }

    async def advance(self, until: int) -> None:
        """Apply every window before ``until``."""
        while self.window < until:
            with in_window(self.window):
                await self.apply(await self.gather())

    async def gather(self) -> GatherResult[Update]:
        """The next window's updates. Waits, and says so, while the chain or the leader's bucket can't be reached."""
        window, pause = self.window, RETRY_SECONDS
        while True:
            try:
                uids = await self._peers(window)
                return await self._borders.comms.gather_updates(
                    uids,
                    window,
                    size=self.outer.spec.expected_size,
                    parse=lambda body, uid: parse(body, self.outer.spec, window=window, uid=uid),
                )
            except (ChainUnavailable, StoreError, PayloadError) as error:
                logger.warning("can't gather yet, trying again in %.0f s: %s", pause, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def _peers(self, window: int) -> Sequence[int]:
        comms = self._borders.comms
        if self._every_peer:
            return sorted(await comms.buckets_in(window))
        listed = await comms.get_peer_list(window)
        if listed is None:
            raise PayloadError("the leading validator has published no peer list for this window")
        return listed.peers

    async def apply(self, gathered: GatherResult[Update]) -> None:
        """One outer step with what was gathered for ``self.window``; then fingerprint, save, publish."""
        began = time.monotonic()
        window, uid = self.window, self._borders.comms.uid
        unavailable = [uid for uid, reason in gathered.skipped.items() if reason is Reason.UNAVAILABLE]
        if unavailable:
            logger.warning("going on without uids %s, which others may have reached", unavailable)
        # Asked for before the step: from there to the save nothing may fail.
        block_hash = await self._borders.comms.window_hash(window + 1)
        await asyncio.to_thread(self.outer.apply, [one.update for one in gathered.updates], step=self.step)
        if any(one.uid == uid for one in gathered.updates):
            self.outer.own_applied(self.step)
        report = await asyncio.to_thread(self._report, gathered, uid, block_hash)
        self.window = window + 1
        await asyncio.to_thread(self._save)
        self._borders.telemetry.emit(
            "applied",
            window=window,
            included=[one.uid for one in gathered.updates],
            skipped={str(uid): reason.value for uid, reason in gathered.skipped.items()},
            bytes=gathered.bytes,
            fingerprint=report.fingerprint,
            digest=report.digest,
            seconds=time.monotonic() - began,
        )
        try:
            await self._borders.comms.put_report(report)
        except StoreError as error:
            logger.warning("report of this window not published: %s", error)

    def _report(self, gathered: GatherResult[Update], uid: int, block_hash: str) -> DebugReport:
        seed = fingerprint_seed(window=gathered.window, block_hash=block_hash)
        own = proof_seed(uid=uid, window=gathered.window, block_hash=block_hash)
        whole = (self.step + 1) % self._hparams.digest_interval_windows == 0
        return DebugReport(
            window=gathered.window,
            uid=uid,
            fingerprint=fingerprint(self.parameters, seed=seed, samples=self._hparams.fingerprint_samples),
            proof=fingerprint(self.parameters, seed=own, samples=self._hparams.fingerprint_samples),
            digest=digest(self.parameters) if whole else "",
            included={str(one.uid): one.sha256 for one in gathered.updates},
            skipped={str(uid): reason.value for uid, reason in gathered.skipped.items()},
        )

    def _save(self) -> None:
        states = {"outer": self.outer.state_dict(), "local": self.local.state_dict()}
        tensors = {f"model.{name}": tensor for name, tensor in self.parameters.items()}
        for half, state in states.items():
            tensors |= {f"{half}.{name}": tensor for name, tensor in state.pop("tensors").items()}
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        try:
            self._folder.save(self.window, tensors, {"run": self._run, **states, "parts": parts})
        except StateError as error:
            # The network's step is done all the same; what is lost is only the way back after a crash.
            logger.error("state not saved: %s", error)
            self._borders.telemetry.emit("problem", text=f"state not saved: {error}")

    @torch.no_grad()
    def _restore(self, saved: SavedState) -> None:
        for half, part in (("outer", self.outer), ("local", self.local)):
            tensors = {
                name.removeprefix(f"{half}."): tensor
                for name, tensor in saved.tensors.items()
                if name.startswith(f"{half}.")
            }
            part.load_state_dict({**saved.values[half], "tensors": tensors})
        for name, parameter in self.parameters.items():
            parameter.copy_(saved.tensors[f"model.{name}"])
        for name, part in self._parts.items():
            part.load_state_dict(saved.values["parts"][name])
        self.window = saved.window
