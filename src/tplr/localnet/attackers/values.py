"""Miners whose updates are not honest work: noise, zeros, or the wrong sign, scale, pages or window."""

from collections.abc import Callable

import numpy as np
import torch

from tplr.compress.payload import Coefficients, Update
from tplr.compress.topk import select
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World
from tplr.seeds import derive
from tplr.training.loss import batch_loss


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

    Its first window is ``begin``.
    """

    def __init__(self, name: str, effort: int, scale: float, *, begin: int = 0) -> None:
        super().__init__(name, effort)
        self._scale = scale
        self._begin = begin

    def body(self, world: World, window: int) -> bytes | None:
        """Return the scaled honest update."""
        if window < self._begin:
            return None
        honest = super().body(world, window)
        assert honest is not None
        update = world.parse(honest, window, self.uid)
        kept = {}
        for name in update.spec.tensors:
            indices, values = update.coefficients(name)
            kept[name] = indices, values * self._scale
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


class Overfitter(Cheat):
    """Overfits one batch of its pages: its update is best on its own pages, and of little use on others.

    With SparseLoCo its norm is about 10 times an average miner's, which is below the rules' limit.
    """

    steps, rate, norm = 10, 5e-3, 1.5

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the weights before many steps on one batch minus the weights after them."""
        model = self.train_state.model
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.0)
        one_batch = world.pages(self.uid, window).batches[0]
        for _ in range(self.steps):
            batch_loss(model, one_batch, world.hparams.precision).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            change = {name: self.norm * (before[name] - one) for name, one in model.named_parameters()}
            for name, one in model.named_parameters():
                one.copy_(before[name])
        return {name: one.detach() for name, one in change.items()}


class WrongPages(Cheat):
    """Trains on pages of its own choice, but names its assigned pages."""

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return pages that are assigned to no miner."""
        return self._share(world, world.pages_of_seed(derive("elsewhere", self.uid, window)).batches)


class OthersPages(Cheat):
    """Trains on ``own`` sequences of its own pages, and for the rest on single ones of other miners' pages.

    A validator predicts its gain on the pages of tested miners, too (``scoring/gain.py``), and these are known.
    Not ``assigned``: as many pages that no miner has, for comparison.
    """

    def __init__(self, name: str, effort: int, own: int, *, assigned: bool = True) -> None:
        super().__init__(name, effort)
        self._own, self._assigned = own, assigned

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return sequences of its own pages, and then of others; whose, and which ones, differs by window."""
        pages = world.pages(self.uid, window).batches
        others = sorted(world.by_uid.keys() - {self.uid}, key=lambda uid: derive("others", self.uid, window, uid))
        chosen = [*_sequences(pages)[: self._own]]
        for i in range(self.effort - self._own):
            sequences = _sequences(self._pages_of(world, others[i % len(others)], window))
            chosen.append(sequences[derive("which", self.uid, window, i) % len(sequences)])
        return self._share(world, np.stack(chosen).reshape(-1, *pages.shape[1:]))

    def _pages_of(self, world: World, uid: int, window: int) -> np.ndarray:
        if self._assigned:
            return world.pages(uid, window).batches
        return world.pages_of_seed(derive("elsewhere", self.uid, window, uid)).batches


def _sequences(batches: np.ndarray) -> np.ndarray:
    return batches.reshape(-1, batches.shape[-1])
