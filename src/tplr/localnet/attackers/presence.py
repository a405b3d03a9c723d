"""Miners that do not work in every window, not in time, or not for long."""

from typing import Literal

import torch

from tplr.compress.payload import Update
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.attackers.values import noise_like
from tplr.localnet.simulation import World
from tplr.seeds import derive

# Windows since the last draw from which it works, so that it does in about a quarter.
WORTH_WORKING = 3


class HalfAbsent(Cheat):
    """Sends an update in every second window only."""

    def body(self, world: World, window: int) -> bytes | None:
        """An honest update, or None."""
        return super().body(world, window) if window % 2 else None


class Late(Cheat):
    """Sends a second after the time bound."""

    def join(self, world: World, uid: int) -> None:
        """Join the network; its updates come late."""
        super().join(world, uid)
        self.sent = world.hparams.time_window_delta_seconds + 1.0


class GoDark(Cheat):
    """Honest until window ``last``, then its bucket answers nobody."""

    def __init__(self, name: str, effort: int, last: int) -> None:
        super().__init__(name, effort)
        self._last = last

    async def act(self, world: World, window: int) -> None:
        """An honest update; after ``last`` only silence."""
        if window > self._last:
            self.store.silent = True
        else:
            await super().act(world, window)

    async def report(self, world: World, window: int) -> None:
        """As an honest miner's, while it is one."""
        if not self.store.silent:
            await super().report(world, window)


class Turncoat(Cheat):
    """Honest until window ``last``; then it sends the opposite of its work."""

    def __init__(self, name: str, effort: int, last: int) -> None:
        super().__init__(name, effort)
        self._last = last

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """The honest tensors, at last with the other sign."""
        sign = 1.0 if window <= self._last else -1.0
        return {name: sign * one for name, one in super().tensors(world, window).items()}


class Timed(Cheat):
    """Trains only in windows in which it is likely to be evaluated, and sends something worthless in others.

    Attributes:
        worked: windows in which it trained.
    """

    def __init__(self, name: str, effort: int, otherwise: Literal["noise", "poison"]) -> None:
        super().__init__(name, effort)
        self._otherwise = otherwise
        self._last: Update | None = None
        self.worked: list[int] = []

    def body(self, world: World, window: int) -> bytes | None:
        """An honest update when due; else its last one with random indices, or with flipped signs."""
        if self._last is None or self.due(world, window):
            body = super().body(world, window)
            assert body is not None
            self._last = world.parse(body, window, self.uid)
            self.worked.append(window)
            return body
        if self._otherwise == "noise":
            kept = noise_like(self._last, 1.0, derive("timed", self.uid, window))
        else:
            kept = {}
            for name in world.spec.tensors:
                indices, values = self._last.coefficients(name)
                kept[name] = indices, -values
        return self.addressed(kept, world, window)

    def due(self, world: World, window: int) -> bool:
        """Whether it works: in windows in which the draw is likeliest to hit it, a quarter of all.

        The chance of the draw grows with the windows since the last one, which it can compute from public blocks.
        """
        drawn = [one.window for one in world.records if one.seen.observations[self.uid].sampled]
        return not drawn or window - drawn[-1] >= WORTH_WORKING
