"""How often an evaluation of so many sequences is wrong about a simulated miner: real updates of a small model.

    python scripts/false_decisions.py [--windows 8] [--draws 400]

Each update is measured on 256 sequences of its own pages and 256 random ones; then so many of them are drawn, again and
again, as an evaluation would, and the decision is compared with what the miner is. Prints a table, and writes it to
``docs/false_decisions.md``. A minute or two.
"""

import argparse
import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Changed, Honest, WrongPages
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small
from tplr.schemas import Evaluation
from tplr.scoring.measures import binary_indicator, gradient_sign
from tplr.training.evaluation import baseline, probing, sequence_losses

TABLE = Path(__file__).parents[1] / "docs" / "false_decisions.md"
COUNTS = (4, 8, 16, 32, 64, 128)
# What is decided of whom, and when that is wrong.
DECISIONS: list[tuple[str, int, Callable[[Evaluation], bool]]] = [
    ("honest: gradient score not above 0", 1, lambda one: gradient_sign("hardened", one) <= 0),
    ("honest: own pages not better", 1, lambda one: binary_indicator("hardened", one) <= 0),
    ("wrong pages: own pages surely better", 2, lambda one: binary_indicator("hardened", one) >= 1),
    ("random values: gradient score above 0", 3, lambda one: gradient_sign("hardened", one) > 0),
    ("random values: the documented +1", 3, lambda one: binary_indicator("documented", one) > 0),
    ("signs flipped: gradient score not below 0", 4, lambda one: gradient_sign("hardened", one) >= 0),
]
Losses = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def measured(world: World, uid: int) -> Losses:
    """Losses of each sequence: own pages before and after, random pages before and after."""
    window = world.window - 1  # the model has moved on by one window: near enough
    own, random = world.pages(uid, window).batches, world.pages_of_seed(99_000 + window).batches
    before = baseline(world.model, own, "float32").losses, baseline(world.model, random, "float32").losses
    with probing(world.model, world.outer, world.updates[uid], step=world.step):
        after = sequence_losses(world.model, own, "float32"), sequence_losses(world.model, random, "float32")
    return before[0], after[0], before[1], after[1]


def drawn(losses: Losses, count: int, random: np.random.Generator) -> Evaluation:
    """An evaluation of ``count`` sequences of each kind."""
    own, other = (random.choice(len(losses[0]), size=count, replace=False) for _ in range(2))
    a, b, c, d = losses[0][own], losses[1][own], losses[2][other], losses[3][other]
    return Evaluation(
        own_before=float(a.mean()),
        own_after=float(b.mean()),
        own_error=float((a - b).std(ddof=1)) / math.sqrt(count),
        own_sequences=count,
        random_before=float(c.mean()),
        random_after=float(d.mean()),
        random_error=float((c - d).std(ddof=1)) / math.sqrt(count),
        random_sequences=count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--draws", type=int, default=400, help="evaluations for each update and number of sequences")
    given = parser.parse_args()
    torch.set_num_threads(1)
    hparams = small(load_hparams(PROFILE), pages_per_window=32, evaluation_sequences=8, validator_sample_rate=0.03)
    members = [
        Honest(256),
        WrongPages("wrong pages", 256),
        Changed("random values", 8, lambda one, random: torch.randn(one.shape, generator=random)),
        Changed("signs flipped", 64, lambda one, _: -one),
    ]
    world, random = World(hparams, members), np.random.default_rng(0)
    found: dict[int, list[Losses]] = {uid: [] for uid in world.by_uid}
    for _ in range(given.windows):
        asyncio.run(world.run(1))
        for uid, all_losses in found.items():
            all_losses.append(measured(world, uid))
    lines = [f"| decided wrongly | {' | '.join(f'{count} sequences' for count in COUNTS)} |", "|---" * 7 + "|"]
    for text, uid, wrong in DECISIONS:
        rates = [
            np.mean([wrong(drawn(one, count, random)) for one in found[uid] for _ in range(given.draws)])
            for count in COUNTS
        ]
        lines.append(f"| {text} | {' | '.join(f'{100 * rate:.1f} %' for rate in rates)} |")
    print("\n".join(lines))
    TABLE.write_text("# How often an evaluation is wrong\n\n`scripts/false_decisions.py`\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
