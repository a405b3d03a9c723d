"""Measures what honest updates share, and what copies share, against the threshold of a copy.

    python scripts/copy_margins.py [--windows 12]

Honest miners have three efforts; in each window some are assigned the pages, or half of the pages, of another miner.
Prints the table of docs/scoring.md: what each pair shares (``tplr.scoring.overlap``), and how many pairs
``tplr.scoring.copies`` classifies as copies. Takes some minutes.
"""

import argparse
from collections import defaultdict

import numpy as np
import torch

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Copier, Honest
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small
from tplr.scoring.copies import COPIED
from tplr.scoring.overlap import overlap, sample_chunks, traits
from tplr.seeds import derive

EFFORTS = (16,) * 8 + (32,) * 8 + (64,) * 4
VICTIM = 9
OWN_INDICES = (0.05, 0.2, 0.3)
OTHER, BEFORE = "honest, other pages", "honest, its own update of the window before"


class SomePages(Honest):
    """Has a part of another miner's pages, of a different one in each window, so that its error feedback is its own."""

    def __init__(self, part: float, others: tuple[int, ...]) -> None:
        super().__init__(32)
        self._part = part
        self._others = others
        self.name = f"honest, {100 * part:.0f} % of the pages the same"

    def partner(self, window: int) -> int:
        """The miner that has the same pages."""
        return self._others[derive("partner", self.uid, window) % len(self._others)]

    def batches(self, world: World, window: int) -> np.ndarray:
        """Partly the partner's pages, partly its own."""
        own, other = (world.pages(uid, window).batches for uid in (self.uid, self.partner(window)))
        cut = round(self._part * self.effort / own.shape[1])
        return self._share(np.concatenate([other[:cut], own[cut:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hparams = small(load_hparams(PROFILE))
    larger = {"hidden_size": 192, "intermediate_size": 768}
    hparams = hparams.model_copy(update={"model": hparams.model.model_copy(update=larger)})
    # Each has other partners, so that no two of them share through a third.
    twins = [SomePages(part, (9 + 2 * i, 10 + 2 * i)) for i, part in enumerate((0.5, 0.5, 1.0, 1.0))]
    honest: list[Honest] = [*(Honest(effort) for effort in EFFORTS), *twins]
    copiers: list[Honest] = [
        Copier("copy", VICTIM),
        Copier("copy with noise", VICTIM, noise=0.5),
        *(Copier(f"copy, {100 * part:.0f} % own indices", VICTIM, own_indices=part) for part in OWN_INDICES),
    ]
    world = World(hparams, [*honest, *copiers])
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(given.windows):
        compare(world, honest, copiers, found)
        print(f"window {world.window - 1}", flush=True)
    print(table(found))


def compare(world: World, honest: list[Honest], copiers: list[Honest], found: dict[str, list[float]]) -> None:
    """Add what all pairs of a window share to ``found``, by kind; then apply the honest updates."""
    window, before = world.window, dict(world.updates)
    for miner in (*honest, *copiers):
        world.updates[miner.uid] = miner.update(world, window)
    sample = sample_chunks(world.spec, derive("compared-chunks", window))
    now = [traits(world.updates[miner.uid], sample) for miner in honest]
    old = [traits(before[miner.uid], sample) for miner in honest if before]
    shared = overlap([*now, *old])
    for row, miner in enumerate(honest):
        for column in range(row):
            twins = isinstance(miner, SomePages) and miner.partner(window) == honest[column].uid
            found[miner.name if twins else OTHER].append(float(shared[row, column]))
        if old:
            found[BEFORE].append(float(shared[row, len(now) + row]))
    for copier in copiers:  # each alone among honest miners
        all_shared = overlap([*now, *old, traits(world.updates[copier.uid], sample)])
        found[copier.name].append(float(all_shared[-1, VICTIM - 1]))
    world.train_state.outer.apply([world.updates[miner.uid] for miner in honest], step=0)
    world.window += 1


def table(found: dict[str, list[float]]) -> str:
    """A row for each kind of pair: number, quantiles of what they share, number classified as copies."""
    lines = ["| pair | pairs | median | 99 % | 99.9 % | most | called copies |", "|---" * 7 + "|"]
    for kind, shared in found.items():
        cells = " | ".join(f"{x:.2f}" for x in np.quantile(shared, (0.5, 0.99, 0.999, 1)))
        lines.append(f"| {kind} | {len(shared)} | {cells} | {sum(one >= COPIED for one in shared)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
