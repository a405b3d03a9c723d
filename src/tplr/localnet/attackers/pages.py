"""Miners that do not train on their assigned pages, or not on these alone, or too much on a few of them."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from tplr.hparams import HParams
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World
from tplr.seeds import derive
from tplr.training.loss import batch_loss

OVERFIT_STEPS, OVERFIT_RATE, OVERFIT_NORM = 10, 5e-3, 1.5


class Overfitter(Cheat):
    """Overfits one batch of its pages: its update is best on its own pages, and of little use on others."""

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the weights before many steps on one batch minus the weights after them."""
        return overfit(self.train_state.model, world.pages(self.uid, window).batches[0], world.hparams)


class WrongPages(Cheat):
    """Trains on pages of its own choice, but names its assigned pages."""

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return pages that are assigned to no miner."""
        return self._share(world, world.pages_of_seed(derive("elsewhere", self.uid, window)).batches)


class Crowder(Cheat):
    """Trains on another miner's pages, but names its own: among many such updates the other one does not stand out.

    Uids begin at eight different sequences of these pages, so that few of the updates are copies of each other.

    Args:
        victim: uid of the other miner.
        own: sequences of its own pages, on which it trains first; then on the first ones of the victim's pages, as the
            victim does, to share its credit.
        begin: its first window.
    """

    def __init__(self, name: str, effort: int, victim: int, *, own: int = 0, begin: int = 0) -> None:
        super().__init__(name, effort)
        self._victim, self._own, self._begin = victim, own, begin

    def body(self, world: World, window: int) -> bytes | None:
        """Return its update; None before it begins."""
        return super().body(world, window) if window >= self._begin else None

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return the first sequences of both pages; without own ones, a part of the victim's that its uid picks."""
        batches = world.pages(self._victim, window).batches
        if self._own:
            own = _sequences(world.pages(self.uid, window).batches)[: self._own]
            both = np.concatenate([own, _sequences(batches)[: self.effort - self._own]])
            return self._share(world, both.reshape(-1, *batches.shape[1:]))
        return self._share(world, np.roll(_sequences(batches), 8 * self.uid, axis=0).reshape(batches.shape))


class OthersPages(Cheat):
    """Trains on ``own`` sequences of its own pages, and for the rest on single ones of other miners' pages.

    A validator predicts its gain on the pages of tested miners, too (``scoring/gain.py``), and these are known.

    Args:
        whose: uids of these other miners; None means all.
        assigned: False: it trains on as many pages that no miner has, for comparison.
    """

    def __init__(
        self, name: str, effort: int, own: int, *, whose: Sequence[int] | None = None, assigned: bool = True
    ) -> None:
        super().__init__(name, effort)
        self._own, self._whose, self._assigned = own, whose, assigned

    def sequences(self, world: World, window: int) -> np.ndarray:
        """Return sequences of its own pages and of others', int64 [effort, length]; which ones differs by window."""
        known = set(world.by_uid if self._whose is None else self._whose) - {self.uid}
        others = sorted(known, key=lambda uid: derive("others", self.uid, window, uid))
        chosen = [*_sequences(world.pages(self.uid, window).batches)[: self._own]]
        for i in range(self.effort - self._own):
            sequences = _sequences(self._pages_of(world, others[i % len(others)], window))
            chosen.append(sequences[derive("which", self.uid, window, i) % len(sequences)])
        return np.stack(chosen)

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return these sequences in batches."""
        sequences = self.sequences(world, window)
        return self._share(world, sequences.reshape(-1, world.hparams.batch_size, sequences.shape[-1]))

    def _pages_of(self, world: World, uid: int, window: int) -> np.ndarray:
        if self._assigned:
            return world.pages(uid, window).batches
        return world.pages_of_seed(derive("elsewhere", self.uid, window, uid)).batches


class PagesOverfitter(OthersPages):
    """Overfits one batch of these sequences."""

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the weights before many steps on this batch minus the weights after them."""
        return overfit(self.train_state.model, self.sequences(world, window), world.hparams)


def _sequences(batches: np.ndarray) -> np.ndarray:
    return batches.reshape(-1, batches.shape[-1])


def overfit(model: PreTrainedModel, batch: np.ndarray, hparams: HParams) -> dict[str, torch.Tensor]:
    """Return a model's weights minus those after many steps on one batch; the model does not change.

    With SparseLoCo the norm is about 10 times an average miner's, which is below the rules' limit.
    """
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=OVERFIT_RATE, weight_decay=0.0)
    for _ in range(OVERFIT_STEPS):
        batch_loss(model, batch, hparams.precision).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        change = {name: OVERFIT_NORM * (before[name] - one) for name, one in model.named_parameters()}
        for name, one in model.named_parameters():
            one.copy_(before[name])
    return {name: one.detach() for name, one in change.items()}
