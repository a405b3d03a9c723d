"""Honest miners: with any effort, and with lost windows; the base class of all cheats."""

from collections.abc import Container, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tplr.compress.payload import Coefficients, Update, build
from tplr.localnet.simulation import Member, World


class Honest(Member):
    """Trains on the first ``effort`` sequences of its pages, and sends its update in time."""

    def __init__(self, effort: int) -> None:
        self.effort = effort
        self.name = f"honest, {effort} sequences"

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return the batches that it trains on."""
        return self._share(world, world.pages(self.uid, window).batches)

    def _share(self, world: World, batches: np.ndarray) -> np.ndarray:
        sequences = batches.reshape(-1, batches.shape[-1])[: self.effort]
        # DeMo takes the mean gradient of all sequences: one large batch is cheapest. SparseLoCo takes a step per batch.
        rows = len(sequences) if world.hparams.outer == "demo" else min(len(sequences), batches.shape[1])
        return sequences.reshape(-1, rows, batches.shape[-1])

    def train(self, world: World, batches: np.ndarray) -> dict[str, torch.Tensor]:
        """Train locally from its weights; return the tensors to send, by name."""
        step = world.train_state.global_step
        expect = partial(self.outer.expected_step, own=None, step=step)
        return self.local.run(self.train_state.model, batches, step=step, expect=expect).tensors

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the tensors that it packs."""
        return self.train(world, self.batches(world, window))

    def body(self, world: World, window: int) -> bytes | None:
        """Return the bytes that it sends; None if its model is no longer finite, so that it has no update."""
        tensors = self.tensors(world, window)
        if not tensors:
            return None
        return self.outer.pack(
            tensors,
            step=world.train_state.global_step,
            window=window,
            uid=self.uid,
            pages_digest=world.pages(self.uid, window).digest,
            batches=self.effort,
        )

    def update(self, world: World, window: int) -> Update:
        """Return its update as other nodes decode it. Raises PayloadError if it is invalid."""
        return world.parse(self.body(world, window) or b"", window, self.uid)

    async def act(self, world: World, window: int) -> None:
        """Commit before the window's end, and upload after it."""
        body = self.body(world, window)
        if body is not None:
            await self.publish(world, window, body)


class Lossy(Honest):
    """Loses some windows, because of a crash or without a network."""

    def __init__(self, effort: int, lost: Container[int]) -> None:
        super().__init__(effort)
        self._lost = lost

    def body(self, world: World, window: int) -> bytes | None:
        """Return an honest update; None in a lost window."""
        return None if window in self._lost else super().body(world, window)


class Cheat(Honest):
    """An honest miner with one change, which a subclass defines."""

    def __init__(self, name: str, effort: int) -> None:
        super().__init__(effort)
        self.name = name
        self.honest = False

    def addressed(self, kept: Mapping[str, Coefficients], world: World, window: int) -> bytes:
        """Return an update with these coefficients and the header of its own honest update."""
        return build(kept, world.spec, **self._metadata(world, window))

    def readdressed(self, sent: Update, world: World, window: int) -> bytes:
        """Return the bytes of another's update with the header of its own honest update."""
        return world.spec.prologue(**self._metadata(world, window)) + sent.body[world.spec.data_start :]

    def _metadata(self, world: World, window: int) -> dict[str, Any]:
        digest, batches = world.pages(self.uid, window).digest, max(self.effort, 1)
        return {"window": window, "uid": self.uid, "pages_digest": digest, "batches": batches}
