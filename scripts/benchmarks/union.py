"""Measures the overlap of entries in a window's updates, and the size of their re-encoded sum.

Twenty honest miners of the simulated network (``tplr.localnet.simulation``: real training, error feedback, SparseLoCo)
send updates; the step of all of them is applied after each window. For the first m updates of each window it reports
the share of entries that any miner sent, and bits per parameter of

- the concatenated updates, as in an aggregate,
- the exact sum: a float32 number for each of these entries, and their positions,
- a sum quantized again, to 8 or 4 bits: smaller, but it can't be verified with the hashes of updates.

Positions count at their entropy per chunk, which is a lower bound.

    python scripts/benchmarks/union.py

Writes ``docs/benchmarks/union.csv``.
"""

import argparse
import csv
import math
from pathlib import Path

import torch

from tplr.compress.payload import Update, decode_all
from tplr.hparams import HParams
from tplr.localnet.attackers.honest import Honest
from tplr.localnet.plan import scheme_constants
from tplr.localnet.simulation import World, small

ROOT = Path(__file__).parents[2]
MINERS, SEQUENCES = 20, 64
COUNTS = (1, 2, 5, 10, 15, 20)


def configured() -> HParams:
    """Return SparseLoCo's constants of a localnet."""
    return small(HParams.model_validate(scheme_constants("sparseloco")), vocabulary=1024)


def union(world: World, updates: list[Update]) -> dict[str, float]:
    """Return the figures of one window's updates, in bits per parameter, except for the share."""
    sent = places = count = 0.0
    for tensor in world.spec.tensors.values():
        indices, _ = decode_all(updates, [tensor])
        entries = tensor.grid.entries
        count += entries * tensor.grid.chunks
        for chunk in indices.transpose(0, 1).flatten(1):
            some = len(torch.unique(chunk))
            sent += some
            bits = math.lgamma(entries + 1) - math.lgamma(some + 1) - math.lgamma(entries - some + 1)
            places += bits / math.log(2)
    return {
        "share": sent / count,
        "end to end": 8 * sum(len(one.body) for one in updates) / count,
        "sum, float32": (32 * sent + places) / count,
        "sum, 8 bits": (8 * sent + places) / count,
        "sum, 4 bits": (4 * sent + places) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    windows = parser.parse_args().windows
    world = World(configured(), [Honest(SEQUENCES) for _ in range(MINERS)])
    rows: list[dict[str, float]] = []
    for window in range(1, windows + 1):
        world.window = window
        updates = []
        for member in world.by_uid.values():
            assert isinstance(member, Honest)
            updates.append(member.update(world, window))
        rows += [{"window": window, "updates": count, **union(world, updates[:count])} for count in COUNTS]
        last = rows[-1]
        print(
            f"window {window}: {last['share']:.3f} of all entries, {last['end to end']:.2f} bits end to end", flush=True
        )
        world.train_state.apply(updates)
    with (ROOT / "docs" / "benchmarks" / "union.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: round(value, 4) for key, value in row.items()})


if __name__ == "__main__":
    main()
