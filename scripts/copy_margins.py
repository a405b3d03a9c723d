"""How far honest miners are from what counts as a copy, and how far copies are below it: real updates of many pairs.

    python scripts/copy_margins.py [--windows 12]

For every pair: what differs, over what may differ before it is called a copy (``tplr.scoring.copies.margins``), by
coordinates and by signs. Honest miners of four efforts; some of them are given the pages, or half of the pages, that
another one has in this window too. Prints the table of docs/scoring.md; some minutes.
"""

import argparse
from collections import defaultdict

import numpy as np
import torch

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Copier, Honest
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small
from tplr.scoring.copies import margins
from tplr.scoring.overlap import Sample, overlap, traits
from tplr.seeds import derive

EFFORTS = (16,) * 8 + (32,) * 8 + (64,) * 4
VICTIM = 9
KINDS = ("honest, other pages", "honest, half of the pages the same", "honest, the same pages")


class SomePages(Honest):
    """Has a part of the pages that another one has, in each window another one's, so its history is its own."""

    def __init__(self, effort: int, part: float) -> None:
        super().__init__(effort)
        self._part = part

    def partner(self, window: int) -> int:
        """Who is given the same: one that trains on as many."""
        alike = [uid for uid, effort in enumerate(EFFORTS, start=1) if effort == self.effort]
        return alike[derive("partner", self.uid, window) % len(alike)]

    def batches(self, world: World, window: int) -> np.ndarray:
        """Some of its own, the others the other one's."""
        own, other = (world.pages(uid, window).batches for uid in (self.uid, self.partner(window)))
        cut = round(self._part * self.effort / own.shape[1])
        return self._share(np.concatenate([other[:cut], own[cut:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hparams = small(load_hparams(PROFILE))
    larger = {"hidden_size": 128, "intermediate_size": 512}
    hparams = hparams.model_copy(update={"model": hparams.model.model_copy(update=larger)})
    twins = [SomePages(32, 0.5), SomePages(32, 0.5), SomePages(32, 1.0), SomePages(32, 1.0)]
    copiers = [
        Copier("copier", VICTIM),
        Copier("copier with noise", VICTIM, noise=0.5),
        *(Copier(f"copier, {100 * part:.0f} % own indices", VICTIM, own_indices=part) for part in (0.05, 0.3, 0.6)),
    ]
    honest = [*(Honest(effort) for effort in EFFORTS), *twins]
    world = World(hparams, [*honest, *copiers])
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(given.windows):
        compare(world, len(honest), found)
    print(table(found))


def compare(world: World, honest: int, found: dict[str, list[tuple[float, float]]]) -> None:
    """One window: margins of all pairs, by kind; then the honest updates are applied."""
    window = world.window
    for uid, member in world.by_uid.items():
        assert isinstance(member, Honest)
        world.updates[uid] = member.update(world, window)
    updates = [world.updates[uid] for uid in world.by_uid]
    sample = Sample.of(world.spec, derive("compared-chunks", window))
    result = margins(overlap([traits(one, sample) for one in updates[:honest]]), honest)
    for row in range(honest):
        for column in range(row):
            kind = _kind(world, row + 1, column + 1)
            found[kind].append((float(result.indices[row, column]), float(result.signs[row, column])))
    for uid in list(world.by_uid)[honest:]:
        # Each alone among the honest, as the one that copies.
        others = [traits(one, sample) for one in (*updates[:honest], world.updates[uid])]
        result = margins(overlap(others), honest + 1)
        pair = float(result.indices[honest, VICTIM - 1]), float(result.signs[honest, VICTIM - 1])
        found[world.by_uid[uid].name].append(pair)
    world.outer.apply(updates[:honest], step=world.step)
    world.window += 1


def _kind(world: World, one: int, other: int) -> str:
    member = world.by_uid[one]
    if isinstance(member, SomePages) and member.partner(world.window) == other:
        return KINDS[2] if member._part == 1 else KINDS[1]
    return KINDS[0]


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Of each kind of pair: how many, quantiles of both margins, and how many are taken for copies."""
    lines = ["| pair | pairs | coordinates: least, 1 %, median | signs: least, 1 %, median | called copies |"]
    lines.append("|---" * 5 + "|")
    for kind in sorted(found, key=lambda one: (one not in KINDS, KINDS.index(one) if one in KINDS else 0)):
        values = np.array(found[kind])
        cells = [" / ".join(f"{x:.2f}" for x in np.quantile(column, (0, 0.01, 0.5))) for column in values.T]
        called = int((values <= 1).any(axis=1).sum())
        lines.append(f"| {kind} | {len(values)} | {cells[0]} | {cells[1]} | {called} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
