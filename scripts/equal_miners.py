"""Measures how much the pay of equal miners differs: real training of a small model, honest miners of one effort.

    python scripts/equal_miners.py [--miners 3] [--effort 64] [--seeds 0 1 2 ... 7]

Prints the table of docs/scoring.md: largest weight divided by smallest after some windows, as paid, and without the
factor ``gain``; median and worst over all seeds. Takes some minutes.
"""

import argparse
import asyncio
from statistics import median

import torch

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Honest
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small

WINDOWS = (1, 3, 7, 10, 20)


def spreads(miners: int, effort: int, seed: int) -> list[tuple[float, float]]:
    """After each window: largest weight divided by smallest, with and without ``gain``."""
    world = World(small(load_hparams(PROFILE)), [Honest(effort) for _ in range(miners)], seed=seed)
    asyncio.run(world.run(max(WINDOWS)))
    found = []
    for record in world.records:
        kept = record.outcome.peer_scores.values()
        finals, others = [one.final for one in kept], [one.final / one.gain for one in kept]
        power = world.hparams.power_normalisation
        found.append(((max(finals) / min(finals)) ** power, (max(others) / min(others)) ** power))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miners", type=int, default=3)
    parser.add_argument("--effort", type=int, default=64, help="sequences trained on in a window")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(8)])
    given = parser.parse_args()
    torch.set_num_threads(1)  # far faster than more on so small a model
    runs = []
    for seed in given.seeds:
        runs.append(spreads(given.miners, given.effort, seed))
        print(f"seed {seed}: {', '.join(f'{runs[-1][windows - 1][0]:.2f}' for windows in WINDOWS)}", flush=True)
    print("| windows | largest over smallest weight: median, worst | without `gain` |\n|---|---|---|")
    for windows in WINDOWS:
        paid, others = zip(*(run[windows - 1] for run in runs), strict=True)
        print(f"| {windows} | {median(paid):.2f}, {max(paid):.2f} | {median(others):.2f}, {max(others):.2f} |")


if __name__ == "__main__":
    main()
