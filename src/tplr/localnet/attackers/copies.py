"""Miners that send other miners' updates, or parts of one: a thief, and owners with several uids."""

from collections.abc import Sequence

import numpy as np
import torch

from tplr.compress.layout import TensorSpec
from tplr.compress.payload import Coefficients, Update
from tplr.compress.topk import select
from tplr.keys import commit_key
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World
from tplr.seeds import derive


class Copier(Cheat):
    """Sends another miner's update as its own, one second after the original was committed.

    With commits, it could not read the update by that time. Here it can, in order to test the pay of a copy.

    Args:
        noise: standard deviation of the logarithm of the random factors on the values.
        own_indices: share of each row's coordinates that random ones replace.
    """

    committed, sent = -4.0, 3.0

    def __init__(self, name: str, victim: int, *, noise: float = 0.0, own_indices: float = 0.0) -> None:
        super().__init__(name, 0)
        self._victim = victim
        self._noise = noise
        self._own_indices = own_indices

    def body(self, world: World, window: int) -> bytes | None:
        """Return the victim's update, or its coefficients with noise; None if the victim sent nothing."""
        stolen = world.updates.get(self._victim)
        if stolen is None or stolen.window != window:
            return None
        if not (self._noise or self._own_indices):
            return self.readdressed(stolen, world, window)
        return self.addressed(self._changed(stolen, window), world, window)

    def _changed(self, stolen: Update, window: int) -> dict[str, Coefficients]:
        random, kept = np.random.default_rng(derive("copier", self.uid, window)), {}
        for name, tensor in stolen.spec.tensors.items():
            indices, values = stolen.coefficients(name)
            values = values * torch.from_numpy(np.exp(self._noise * random.standard_normal(values.shape))).float()
            if self._own_indices and not tensor.dense:
                indices, values = _replace_some(indices, values, tensor, self._own_indices, random)
            kept[name] = indices, values
        return kept


class Twin(Copier):
    """One of an owner's uids that all send the same update: the first one trains, and each deletes its commit.

    It deletes its commit after the included set is published, so that validators can't tell later which uid was first.

    Args:
        first: uid that trains; for the training uid, its own.
        pages_of: uids on whose pages it trains, equally; by default on its own.
    """

    committed, sent = -5.0, 2.0

    def __init__(
        self,
        name: str,
        first: int,
        effort: int,
        *,
        noise: float = 0.0,
        own_indices: float = 0.0,
        pages_of: Sequence[int] = (),
    ) -> None:
        super().__init__(name, first, noise=noise, own_indices=own_indices)
        self.effort = effort
        self._pages_of = pages_of

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return its sequences in batches."""
        if not self._pages_of:
            return super().batches(world, window)
        return self._share(world, first_sequences(world, window, self._pages_of, self.effort // len(self._pages_of)))

    def body(self, world: World, window: int) -> bytes | None:
        """Return its owner's update."""
        return Cheat.body(self, world, window) if self.uid == self._victim else super().body(world, window)

    async def after_set(self, world: World, window: int) -> None:
        """Delete the commit. On probation it keeps the commit: validators measure no update without one."""
        if self.uid in world.peers:
            await self.store.delete(commit_key(window, self.uid, world.hparams.version))


class InTurns(Copier):
    """One of an owner's uids that take turns: in each window some of them, other ones each time, send one work.

    The work is on pages of those whose turn it is. Each is absent from most windows, and seldom meets the same other.

    Args:
        uids: of the owner.
        at_once: number of uids whose turn a window is.
        first: the uids' miner whose error feedback and optimizer the owner uses; None for that one.
    """

    committed, sent = -5.0, 2.0

    def __init__(
        self, name: str, effort: int, uids: Sequence[int], *, at_once: int, first: "InTurns | None" = None
    ) -> None:
        super().__init__(name, uids[0])
        self.effort = effort
        self._uids, self._at_once, self._first = uids, at_once, first or self

    def turn(self, window: int) -> list[int]:
        """Return the uids whose turn this window is, ascending."""
        random = np.random.default_rng(derive("in turns", window))
        return sorted(random.permutation(self._uids)[: self._at_once].tolist())

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return as many sequences of the pages of each uid whose turn it is, in batches."""
        return self._share(world, first_sequences(world, window, self.turn(window), self.effort // self._at_once))

    def body(self, world: World, window: int) -> bytes | None:
        """Return the owner's update; None if it is not this uid's turn."""
        turn = self.turn(window)
        if self.uid not in turn:
            return None
        self._victim, self.local, self.outer = turn[0], self._first.local, self._first.outer
        return Cheat.body(self, world, window) if self.uid == turn[0] else super().body(world, window)


class Dealt(Cheat):
    """One of an owner's uids that send parts of one work: the first trains, the others send its next largest entries.

    The work is on pages of all of them, so each part has learned a little of its own pages. With SparseLoCo each part
    is packed after another decay of the error feedback, so the parts are smaller than those of an owner that changes
    the packing: the attack is weaker than it could be.

    Args:
        uids: of the owner.
        first: the uid's miner that trains; None for that one.
    """

    def __init__(self, name: str, effort: int, uids: Sequence[int], first: "Dealt | None" = None) -> None:
        super().__init__(name, effort)
        self._uids, self._first = uids, first

    def batches(self, world: World, window: int) -> np.ndarray:
        """Return as many sequences of each uid's pages, in batches."""
        return self._share(world, first_sequences(world, window, self._uids, self.effort // len(self._uids)))

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return the work, or zeros: the rest is in the error feedback, which all of the uids share."""
        if self._first is None:
            return super().tensors(world, window)
        self.outer = self._first.outer
        return {name: torch.zeros_like(one) for name, one in world.train_state.parameters.items()}


class Pooled(Cheat):
    """One of an owner's uids that each send their own work, and a share of the work of all the others.

    Args:
        owned: the owner's miners of this kind; this one adds itself.
        others: share of the others' work.
    """

    def __init__(self, name: str, effort: int, owned: list["Pooled"], *, others: float) -> None:
        super().__init__(name, effort)
        owned.append(self)
        self._owned, self._others = owned, others
        self._works: dict[int, dict[str, torch.Tensor]] = {}  # by window: only the newest

    def work(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return its own work of a window, for which it trains once."""
        if window not in self._works:
            self._works = {window: self.train(world, self.batches(world, window))}
        return self._works[window]

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Return its own work and the share of the others'."""
        own, rest = self.work(world, window), [one.work(world, window) for one in self._owned if one is not self]
        return {
            name: one + self._others * torch.stack([each[name] for each in rest]).sum(0) for name, one in own.items()
        }


def first_sequences(world: World, window: int, uids: Sequence[int], count: int) -> np.ndarray:
    """Return the first sequences of each uid's pages, in batches: [batches, batch size, sequence length]."""
    pages = [world.pages(uid, window).batches for uid in uids]
    sequences = np.concatenate([one.reshape(-1, one.shape[-1])[:count] for one in pages])
    return sequences.reshape(-1, world.hparams.batch_size, sequences.shape[-1])


def _replace_some(
    indices: torch.Tensor, values: torch.Tensor, tensor: TensorSpec, share: float, random: np.random.Generator
) -> Coefficients:
    """Replace ``share`` of each row's coordinates with random other ones, and keep the values."""
    (chunks, k), entries = indices.shape, tensor.grid.entries
    count = round(share * k)
    if not count or k + count > entries:
        return indices, values
    order = torch.from_numpy(random.random((chunks, entries))).scatter_(1, indices, 2.0)  # 2: sent already
    replaced = torch.from_numpy(random.random((chunks, k))).topk(count, dim=1).indices
    if tensor.grouped:  # replace each with another one of its group
        return indices.scatter(1, replaced, select(2 - order, k, grouped=True)[0].gather(1, replaced)), values
    fresh = order.topk(count, dim=1, largest=False).indices
    merged = indices.scatter(1, replaced, fresh)
    merged, position = merged.sort(dim=1)
    return merged, values.gather(1, position)
