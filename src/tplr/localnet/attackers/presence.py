"""Miners that skip windows, upload late, or stop working honestly."""

from typing import Any, Literal

import torch

from tplr.compress.payload import Update
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.attackers.values import noise_like
from tplr.localnet.simulation import World
from tplr.seeds import derive


class HalfAbsent(Cheat):
    """Sends an update in every second window only."""

    def body(self, world: World, window: int) -> bytes | None:
        """Return an honest update in odd windows, else None."""
        return super().body(world, window) if window % 2 else None


class Late(Cheat):
    """Uploads one second after the time bound."""

    def join(self, world: World, uid: int) -> None:
        """Join the network, and delay its uploads past the time bound."""
        super().join(world, uid)
        self.sent = world.hparams.time_window_delta_seconds + 1.0


class GoDark(Cheat):
    """Is honest until window ``last``; then its bucket stops answering."""

    def __init__(self, name: str, effort: int, last: int) -> None:
        super().__init__(name, effort)
        self._last = last

    async def act(self, world: World, window: int) -> None:
        """Send an honest update; after window ``last``, silence its bucket."""
        if window > self._last:
            self.store.silent = True
        else:
            await super().act(world, window)

    async def report(self, world: World, window: int) -> None:
        """Publish an honest report until its bucket is silent."""
        if not self.store.silent:
            await super().report(world, window)


class Turncoat(Cheat):
    """Is honest until window ``last``; then it sends its tensors with the opposite sign."""

    def __init__(self, name: str, effort: int, last: int) -> None:
        super().__init__(name, effort)
        self._last = last

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the honest tensors; where it harms, with the opposite sign."""
        sign = -1.0 if self.harms(window) else 1.0
        return {name: sign * one for name, one in super().tensors(world, window).items()}

    def harms(self, window: int) -> bool:
        """Return whether it sends the opposite of its work in ``window``."""
        return window > self._last


class PeriodicTurncoat(Turncoat):
    """Harms only in the first ``harmful`` of every ``period`` windows after window ``last``."""

    def __init__(self, name: str, effort: int, last: int, *, harmful: int, period: int) -> None:
        super().__init__(name, effort, last)
        self._harmful, self._period = harmful, period

    def harms(self, window: int) -> bool:
        """Return whether it sends the opposite of its work in ``window``."""
        return super().harms(window) and (window - self._last - 1) % self._period < self._harmful


class HidingTurncoat(PeriodicTurncoat):
    """Names other pages than its own where it harms, so that nobody measures the update."""

    def body(self, world: World, window: int) -> bytes | None:
        """Return an honest update; where it harms, the opposite one with the pages of another uid in its header."""
        body = super().body(world, window)
        if body is None or not self.harms(window):
            return body
        return self.readdressed(world.parse(body, window, self.uid), world, window)

    def _metadata(self, world: World, window: int) -> dict[str, Any]:
        return super()._metadata(world, window) | {"pages_digest": world.pages(self.uid + 1, window).digest}


class Dormant(Turncoat):
    """Is a turncoat that uploads too late, except in the last two of every ``pay_windows`` windows."""

    def body(self, world: World, window: int) -> bytes | None:
        """Return an update; set the time of its upload."""
        after, period = window - self._last - 1, world.hparams.pay_windows
        late = after >= 0 and after % period < period - 2
        self.sent = world.hparams.time_window_delta_seconds + 1.0 if late else type(self).sent
        return super().body(world, window)


class Timed(Cheat):
    """Trains only in windows in which it is likely to be evaluated, and sends something worthless in others.

    Attributes:
        worked: windows in which it trained.
    """

    def __init__(self, name: str, effort: int, otherwise: Literal["noise", "poison"], *, last: int = 0) -> None:
        """Create a miner that trains in all windows until ``last``."""
        super().__init__(name, effort)
        self._otherwise, self._last = otherwise, last
        self._latest: Update | None = None
        self.worked: list[int] = []

    def body(self, world: World, window: int) -> bytes | None:
        """Return an honest update when due; else its last one with random indices, or with flipped signs."""
        if self._latest is None or window <= self._last or self.due(world, window):
            body = super().body(world, window)
            assert body is not None
            self._latest = world.parse(body, window, self.uid)
            self.worked.append(window)
            return body
        if self._otherwise == "noise":
            kept = noise_like(self._latest, 1.0, derive("timed", self.uid, window))
        else:
            kept = {}
            for name in world.spec.tensors:
                indices, values = self._latest.coefficients(name)
                kept[name] = indices, -values
        return self.addressed(kept, world, window)

    def due(self, world: World, window: int) -> bool:
        """Return whether it works in this window: only if its evaluation is likely.

        The probability grows with the windows since its last evaluation, which it can compute from public blocks. So it
        works again after as many windows as lie between two of its evaluations on average, and at least two.
        """
        drawn = [one.window for one in world.records if one.seen.observations[self.uid].sampled]
        between = round(len(world.by_uid) / world.hparams.uids_per_window)
        return not drawn or window - drawn[-1] >= max(2, between)
