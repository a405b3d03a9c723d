"""Measures how often an evaluation is wrong about a simulated miner, by its number of sequences.

    python scripts/false_decisions.py [--windows 6] [--miners 4] [--draws 50]

Real updates of a small model. Each is measured on 256 sequences of its assigned pages and on 256 held-out ones.
Evaluations then sample from these, and their decisions are compared with the kind of the miner. Prints the table of
docs/scoring.md: shares of wrong decisions with 95 % intervals, an update being one observation. Takes some minutes.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tplr.compress.payload import Update
from tplr.hparams import load_hparams
from tplr.localnet.attackers import Changed, Honest, WrongPages
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small
from tplr.schemas import Evaluation
from tplr.scoring.measures import binary_indicator, gradient_sign
from tplr.training.evaluation import baseline, sequence_losses, trial_step_applied

COUNTS = (8, 16, 32, 64, 128)
MEASURED = 256
HONEST, WRONG, RANDOM, FLIPPED = "honest", "wrong pages", "random values", "signs flipped"


class Decision(NamedTuple):
    """A wrong decision about miners of a kind, and whether an evaluation makes it."""

    kind: str
    text: str
    wrong: Callable[[Evaluation], bool]


DECISIONS = [
    Decision(HONEST, "makes the model worse", lambda one: gradient_sign("hardened", one) < 0),
    Decision(HONEST, "not distinguished from zero", lambda one: gradient_sign("hardened", one) == 0),
    Decision(FLIPPED, "makes the model better", lambda one: gradient_sign("hardened", one) > 0),
    Decision(FLIPPED, "not distinguished from zero", lambda one: gradient_sign("hardened", one) == 0),
    Decision(RANDOM, "makes the model better", lambda one: gradient_sign("hardened", one) > 0),
    Decision(HONEST, "no better on its assigned pages", lambda one: binary_indicator("hardened", one) <= 0),
    Decision(
        HONEST, "no better on its assigned pages, documented", lambda one: binary_indicator("documented", one) < 0
    ),
    Decision(WRONG, "surely better on its assigned pages", lambda one: binary_indicator("hardened", one) >= 1),
    Decision(WRONG, "better on its assigned pages, documented", lambda one: binary_indicator("documented", one) > 0),
]


class Losses(NamedTuple):
    """Loss of each sequence before and after an update, in nats per token: float (MEASURED,)."""

    assigned_before: np.ndarray
    assigned_after: np.ndarray
    held_out_before: np.ndarray
    held_out_after: np.ndarray


def members(of_each: int) -> list[Honest]:
    """``of_each`` miners of each kind."""
    made: list[Honest] = []
    for _ in range(of_each):
        made += [
            Honest(MEASURED),
            WrongPages(WRONG, MEASURED),
            Changed(RANDOM, 8, lambda one, random: torch.randn(one.shape, generator=random)),
            Changed(FLIPPED, 64, lambda one, _: -one),
        ]
    return made


def measured(world: World, update: Update, random: np.ndarray, before: np.ndarray) -> Losses:
    """Measure an update; ``before``: losses of ``random`` before it."""
    own = world.pages(update.uid, world.window).batches.reshape(1, MEASURED, -1)
    assigned_before = baseline(world.train_state.model, own, "float32").losses
    with trial_step_applied(world.train_state.model, world.train_state.outer, update, step=0):
        after = [sequence_losses(world.train_state.model, one, "float32") for one in (own, random)]
    return Losses(assigned_before, after[0], before, after[1])


def sampled(losses: Losses, count: int, random: np.random.Generator) -> Evaluation:
    """An evaluation of ``count`` sequences of each kind."""
    own, other = (random.permutation(MEASURED)[:count] for _ in range(2))
    own_fall = (losses.assigned_before - losses.assigned_after)[own]
    random_fall = (losses.held_out_before - losses.held_out_after)[other]
    return Evaluation(
        assigned_before=float(losses.assigned_before[own].mean()),
        assigned_after=float(losses.assigned_after[own].mean()),
        assigned_error=float(own_fall.std(ddof=1)) / math.sqrt(count),
        assigned_sequences=count,
        held_out_before=float(losses.held_out_before[other].mean()),
        held_out_after=float(losses.held_out_after[other].mean()),
        held_out_error=float(random_fall.std(ddof=1)) / math.sqrt(count),
        held_out_sequences=count,
    )


def live(world: World, miners: Sequence[Honest], windows: int) -> dict[str, list[Losses]]:
    """Losses of all updates by kind of miner; honest updates are applied to the model."""
    found: dict[str, list[Losses]] = {HONEST: [], WRONG: [], RANDOM: [], FLIPPED: []}
    for _ in range(windows):
        updates = {miner.uid: miner.update(world, world.window) for miner in miners}
        random = world.pages_of_seed(99_000 + world.window).batches.reshape(1, MEASURED, -1)
        before = baseline(world.train_state.model, random, "float32").losses
        for miner in miners:
            kind = HONEST if miner.honest else miner.name
            found[kind].append(measured(world, updates[miner.uid], random, before))
        world.train_state.outer.apply([updates[miner.uid] for miner in miners if miner.honest], step=0)
        world.window += 1
        print(f"window {world.window - 1}: loss {before.mean():.4f}", flush=True)
    return found


def share(rates: Sequence[float], count: int) -> str:
    """Mean of ``rates`` (one per update) with its 95 % interval; if it is zero, the interval's upper end."""
    mean = float(np.mean(rates))
    if mean == 0:
        # The rule of three, over evaluations of which no two share a sequence.
        return f"0 (< {300 / (len(rates) * (MEASURED // count)):.1f}) %"
    return f"{100 * mean:.1f} ± {196 * float(np.std(rates, ddof=1)) / math.sqrt(len(rates)):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--miners", type=int, default=4, help="of each kind")
    parser.add_argument("--draws", type=int, default=50, help="evaluations per update and number of sequences")
    given = parser.parse_args()
    torch.set_num_threads(1)
    miners = members(given.miners)
    world = World(small(load_hparams(PROFILE), pages_per_window=MEASURED // 8), miners)
    found, random = live(world, miners, given.windows), np.random.default_rng(0)
    rates: dict[tuple[int, int], list[float]] = {}
    for column, count in enumerate(COUNTS):
        for kind, updates in found.items():
            asked = [(row, one.wrong) for row, one in enumerate(DECISIONS) if one.kind == kind]
            for losses in updates:
                evaluations = [sampled(losses, count, random) for _ in range(given.draws)]
                for row, wrong in asked:
                    rates.setdefault((row, column), []).append(float(np.mean([wrong(one) for one in evaluations])))
    print(f"\n| miner | decided wrongly | {' | '.join(f'{count} sequences' for count in COUNTS)} |")
    print("|---" * (2 + len(COUNTS)) + "|")
    for row, decision in enumerate(DECISIONS):
        cells = [share(rates[row, column], count) for column, count in enumerate(COUNTS)]
        print(f"| {decision.kind} | {decision.text} | {' | '.join(cells)} |")
    print(f"\n{len(found[HONEST])} updates of each kind, {given.draws} evaluations of each")


if __name__ == "__main__":
    main()
