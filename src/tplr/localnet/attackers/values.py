"""Miners whose updates are not honest work: noise, zeros, a plain gradient, or the wrong sign, scale or window."""

from collections.abc import Callable

import torch

from tplr.compress.payload import Coefficients, Update
from tplr.compress.topk import select
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World
from tplr.seeds import derive
from tplr.training.alignment import TINY, probe_gradient


class Changed(Cheat):
    """Sends changed tensors of an honest update."""

    def __init__(self, name: str, effort: int, change: Callable[[torch.Tensor, torch.Generator], torch.Tensor]) -> None:
        super().__init__(name, effort)
        self._change = change

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the changed tensors."""
        random = torch.Generator().manual_seed(derive("changed", self.uid, window) >> 1)
        return {name: self._change(one, random) for name, one in super().tensors(world, window).items()}


class Noise(Cheat):
    """Sends random values at random indices, ``scale`` times as large as an honest miner's, without training."""

    def __init__(self, name: str, scale: float = 1.0) -> None:
        super().__init__(name, 0)
        self._scale = scale

    def body(self, world: World, window: int) -> bytes | None:
        """Return noise with the norms of the last update of uid 1."""
        kept = noise_like(world.updates[1], self._scale, derive("noise", self.uid, window))
        return self.addressed(kept, world, window)


def noise_like(update: Update, scale: float, seed: int) -> dict[str, Coefficients]:
    """Return coefficients with random indices and signs, and ``scale`` times the values of an update."""
    random, kept = torch.Generator().manual_seed(seed >> 1), {}
    for name, tensor in update.spec.tensors.items():
        indices, values = update.coefficients(name)
        if not tensor.dense:
            places = torch.rand(len(indices), tensor.grid.entries, generator=random)
            indices, _ = select(places, tensor.k, grouped=tensor.grouped)
        signs = torch.randint(0, 2, values.shape, generator=random) * 2 - 1
        kept[name] = indices, values.abs() * signs * scale
    return kept


class Scaled(Cheat):
    """Sends an honest update multiplied by ``scale``: it multiplies the codebooks, so nothing else changes.

    Its first window is ``begin``. If ``only`` is given, it sends honest updates in all other windows.
    """

    def __init__(self, name: str, effort: int, scale: float, *, begin: int = 0, only: int | None = None) -> None:
        super().__init__(name, effort)
        self._scale = scale
        self._begin = begin
        self._only = only

    def body(self, world: World, window: int) -> bytes | None:
        """Return the scaled honest update."""
        if window < self._begin:
            return None
        honest = super().body(world, window)
        assert honest is not None
        if self._only not in (None, window):
            return honest
        update = world.parse(honest, window, self.uid)
        kept = {}
        for name in update.spec.tensors:
            indices, values = update.coefficients(name)
            kept[name] = indices, values * self._scale
        return self.addressed(kept, world, window)


class PlainGradient(Cheat):
    """Sends the largest entries of one gradient on its pages, and takes no inner steps: the steepest direction.

    With ``scale`` times an honest update's norms. A whole step of such updates overshoots.
    """

    def __init__(self, name: str, effort: int, scale: float = 1.0) -> None:
        super().__init__(name, effort)
        self._scale = scale

    def body(self, world: World, window: int) -> bytes | None:
        """Return the gradient, with the norms of the last update of uid 1 times ``scale``."""
        batches, precision = self.batches(world, window), world.hparams.precision
        gradient = probe_gradient(self.train_state.model, batches, precision).tensors
        kept = {}
        for name, tensor in world.spec.tensors.items():
            chunks = self.outer.in_basis(tensor.grid.cut(tensor.grid.view(gradient[name])), tensor.grid)
            indices, values = select(chunks, tensor.k, grouped=tensor.grouped)
            length = self._scale * world.updates[1].norm(name)
            kept[name] = indices, values * (length / max(float(values.norm()), TINY))
        return self.addressed(kept, world, window)


class Zeros(Cheat):
    """Sends zeros, without training."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0)

    def body(self, world: World, window: int) -> bytes | None:
        """Return an update with zeros at the first indices."""
        kept = {}
        for name, tensor in world.spec.tensors.items():
            kept[name] = select(torch.zeros(tensor.grid.chunks, tensor.grid.entries), tensor.k, grouped=tensor.grouped)
        return self.addressed(kept, world, window)


class Repeater(Cheat):
    """Trains once, and sends that update in every window."""

    def __init__(self, name: str, effort: int) -> None:
        super().__init__(name, effort)
        self._first: Update | None = None

    def body(self, world: World, window: int) -> bytes | None:
        """Return its first update with this window's header."""
        if self._first is None:
            body = super().body(world, window)
            assert body is not None
            self._first = world.parse(body, window, self.uid)
            return body
        kept = {name: self._first.coefficients(name) for name in self._first.spec.tensors}
        return self.addressed(kept, world, window)
