"""Records inner products of simulated updates with a validator's gradients, and the loss changes that they cause.

    python scripts/predicted_gain.py FOLDER [--schemes demo sparseloco] [--seeds 0 1 2 3] [--windows 30]

Real training of a small model. In each window, honest miners and cheats send updates; only those of honest miners are
applied. Writes ``FOLDER/SCHEME-VOCABULARY-SEED.npz``, from which ``predicted_gain_tables.py`` makes the tables of
docs/benchmarks/scoring.md. A run takes about three minutes of one core.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tplr.compress.dct import inverse, transform
from tplr.compress.payload import Update
from tplr.hparams import HParams
from tplr.localnet.attackers import Changed, Copier, Dealt, Honest, Overfitter, PlainGradient, Repeater, WrongPages
from tplr.localnet.plan import Scheme
from tplr.localnet.simulation import SINGLE_BYTES, VOCABULARY, World, profile, small
from tplr.training.evaluation import sequence_losses
from tplr.training.gradient import WindowGradient

SPLIT = 8
DEALER = 29  # uid that trains what eight send
HELD_OUT, FRESH = 98_000, 498_000  # of the seeds of pages: with the validator's gradient, and without any
Tensors = Mapping[str, torch.Tensor]


def members() -> dict[str, list[Honest]]:
    """Return the groups of miners; uids follow this order, from 1."""
    dealer = Dealt("", 64, (DEALER,))
    return {
        "honest 8": [Honest(8)],
        "honest 24": [Honest(24)],
        "honest 64": [Honest(64) for _ in range(3)],
        "random values": [Changed("", 8, lambda one, random: torch.randn(one.shape, generator=random))],
        "signs flipped": [Changed("", 64, lambda one, _: -one)],
        "large norm": [Changed("", 64, lambda one, _: 12 * one)],
        "copier with noise": [Copier("", 3, noise=0.5)],
        "copier, 30 % own indices": [Copier("", 3, own_indices=0.3)],
        "repeater": [Repeater("", 64)],
        "overfitter": [Overfitter("", 64)],
        "wrong pages": [WrongPages("", 64)],
        "master": [Honest(64)],
        "identical clones": [Copier("", 14) for _ in range(3)],
        "near clones": [Copier("", 14, noise=0.2, own_indices=0.1) for _ in range(3)],
        "split": [Honest(64 // SPLIT) for _ in range(SPLIT)],
        "dealt": [dealer, *(Dealt("", 64, (DEALER,), dealer) for _ in range(SPLIT - 1))],
        "plain gradient": [PlainGradient("", 8)],
    }


def configured(scheme: Scheme, vocabulary: int) -> HParams:
    """Return the constants of the simulation for a scheme."""
    return small(profile(scheme), vocabulary=vocabulary)


class Run:
    """A simulated network of one scheme, and its measurements."""

    def __init__(self, scheme: Scheme, vocabulary: int, seed: int) -> None:
        self.groups = members()
        self.world = World(
            configured(scheme, vocabulary), [one for some in self.groups.values() for one in some], seed=seed
        )
        self.outer = self.world.train_state.outer
        self.model = self.world.train_state.model
        self.applied = [1, 2, 3, 4, 5]
        # Every second window: the miners on whose pages a validator also computes a gradient, and those whose loss
        # changes it measures.
        self.tested = [1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 21]
        self.evaluated = [*range(1, 16), 18, 21, 22, 29, 30, 36, 37]

    def window(self) -> dict[str, np.ndarray]:
        """Measure all updates, and apply those of the honest miners."""
        world, window = self.world, self.world.window
        updates: dict[int, Update] = {}
        for uid, member in world.by_uid.items():
            assert isinstance(member, Honest)
            world.updates[uid] = updates[uid] = member.update(world, window)
        probe = world.pages_of_seed(HELD_OUT + window + 1000 * world.seed).batches
        rows = [self.coordinates(update) for update in updates.values()]
        gradient = self.gradient(probe)
        deep = window % 2 == 0
        own = [self.gradient(world.pages(uid, window).batches) for uid in self.tested] if deep else []
        found = measure(rows, gradient, own)
        self.outer.set_caps([updates[uid] for uid in self.applied], step=world.train_state.global_step)
        found["factors"] = self.clipped(found["norms"])
        before = sequence_losses(self.model, probe, "float32")
        found["loss"] = before.mean(keepdims=True)
        if deep:
            falls = [before - self.losses_after(updates[uid], probe) for uid in self.evaluated]
            found["falls"] = np.stack(falls)
            fresh = world.pages_of_seed(FRESH + window + 1000 * world.seed).batches
            before = sequence_losses(self.model, fresh, "float32")
            found["fresh_falls"] = np.stack([before - self.losses_after(updates[uid], fresh) for uid in self.evaluated])
            if world.hparams.outer == "demo":
                found["signed"] = np.array([self.signed(row, gradient) for row in rows])
        else:
            del found["owns"], found["own_lengths"]
        if window % 6 == 0:
            found |= self.own_falls(updates)
        self.outer.apply([updates[uid] for uid in self.applied], step=world.train_state.global_step)
        world.train_state.global_step += 1
        world.window += 1
        return found

    def own_falls(self, updates: Mapping[int, Update]) -> dict[str, np.ndarray]:
        """Return the decreases of the loss on assigned pages, for the test by losses."""
        falls, befores = [], []
        for uid in self.tested:
            pages = self.world.pages(uid, self.world.window).batches
            before = sequence_losses(self.model, pages, "float32")
            falls.append(before - self.losses_after(updates[uid], pages))
            befores.append(before)
        return {"own_falls": np.stack(falls), "own_before": np.stack(befores)}

    def clipped(self, norms: np.ndarray) -> np.ndarray:
        """Return factors of updates and tensors [uids, tensors] in SparseLoCo's step, when the window is applied."""
        if self.world.hparams.outer == "demo":
            return np.ones_like(norms)
        step, names = self.world.train_state.global_step, self.outer.spec.tensors
        factors = [self.outer.step_factors(name, norms[:, i].tolist(), step=step) for i, name in enumerate(names)]
        return np.array(factors).T

    @torch.no_grad()
    def losses_after(self, update: Update, batches: np.ndarray) -> np.ndarray:
        """Return the losses after the trial step, which is clipped like the window's step."""
        parameters = self.world.train_state.parameters
        before = {name: one.detach().clone() for name, one in parameters.items()}
        self.outer.trial_step(update, step=self.world.train_state.global_step)
        losses = sequence_losses(self.model, batches, "float32")
        for name, one in parameters.items():
            one.copy_(before[name])
        return losses

    def gradient(self, batches: np.ndarray) -> list[torch.Tensor]:
        """Return each tensor's gradient on batches in the basis of the coordinates, chunk by chunk."""
        found = WindowGradient("float32").run(self.model, batches, step=0).tensors
        chunks = {name: one.grid.cut(one.grid.view(found[name])) for name, one in self.outer.spec.tensors.items()}
        if self.world.hparams.outer == "demo":
            return [transform(chunks[name], one.grid) for name, one in self.outer.spec.tensors.items()]
        return list(chunks.values())

    def coordinates(self, update: Update) -> list[torch.Tensor]:
        """Return an update as dense values: [chunks, entries] of each tensor."""
        rows = []
        for name, tensor in update.spec.tensors.items():
            indices, values = update.coefficients(name)
            rows.append(torch.zeros(tensor.grid.chunks, tensor.grid.entries).scatter_(1, indices, values))
        return rows

    def signed(self, row: list[torch.Tensor], gradient: list[torch.Tensor]) -> list[float]:
        """Return each tensor's inner products with the signs of the decoded update."""
        grids = [one.grid for one in self.outer.spec.tensors.values()]
        return [
            float((inverse(mine, grid).sign() * inverse(theirs, grid)).sum(dtype=torch.float64))
            for mine, theirs, grid in zip(row, gradient, grids, strict=True)
        ]


def measure(
    rows: Sequence[list[torch.Tensor]], gradient: list[torch.Tensor], own: Sequence[list[torch.Tensor]]
) -> dict[str, np.ndarray]:
    """Return the inner products of each tensor: uids first, tensors last."""
    products, norms, gram, owns = [], [], [], []
    for i, probe in enumerate(gradient):
        x = torch.stack([row[i].flatten() for row in rows]).double()
        g = torch.stack([probe.flatten(), *(one[i].flatten() for one in own)]).double()
        inner = (g @ x.T).numpy()
        products.append(inner[0])
        owns.append(inner[1:])
        gram.append((x @ x.T).numpy())
        norms.append(x.norm(dim=1).numpy())
    sizes = [one.numel() for one in gradient]
    gradient_norms = [float(one.double().norm()) for one in gradient]
    own_lengths = [sum(float(tensor.double().square().sum()) for tensor in one) ** 0.5 for one in own]
    return {
        "products": np.stack(products, axis=-1),
        "norms": np.stack(norms, axis=-1),
        "gram": np.stack(gram, axis=-1),
        "owns": np.stack(owns, axis=-1),
        "gradient_norms": np.array(gradient_norms),
        "own_lengths": np.array(own_lengths),
        "sizes": np.array(sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["demo", "sparseloco"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--single-bytes", action="store_true", help="a token for each byte of the corpus")
    given = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary = SINGLE_BYTES if given.single_bytes else VOCABULARY
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for scheme in given.schemes:
            run, windows = Run(scheme, vocabulary, seed), []
            for _ in range(given.windows):
                windows.append(run.window())
                print(f"{scheme}, seed {seed}, window {len(windows)}: loss {windows[-1]['loss'][0]:.4f}", flush=True)
            names = set().union(*windows)
            data: dict[str, Any] = {
                name: np.stack([one[name] for one in windows if name in one]) for name in sorted(names)
            }
            kinds = [kind for kind, some in run.groups.items() for _ in some]
            about: dict[str, Any] = {"kinds": kinds, "tested": run.tested, "evaluated": run.evaluated}
            np.savez_compressed(given.folder / f"{scheme}-{vocabulary}-{seed}.npz", **about | data)


if __name__ == "__main__":
    main()
