"""How long honest updates are, as a share of the largest norm that honest training can have.

That norm is ``OuterScheme.largest_norm``. With DeMo the first peer's gradient is also the validator's.

An update is ``outsized`` above that norm. Two simulated peers train the model of the reduced grid of
``convergence.py``; one of them may be unable to send in most windows, so that its error feedback grows.

    python scripts/benchmarks/honest_norms.py     # five minutes of a core

Prints a table and writes ``docs/benchmarks/honest_norms.csv``.
"""

import csv
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from convergence_cell import batches_of, make_hparams
from convergence_grid import GRIDS, Cell
from convergence_text import load_tokens

from tplr.compress.payload import parse
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "honest_norms.csv"
GRID = replace(GRIDS["reduced"], peers=2)
ABOUT = {"pages_digest": "0" * 64, "batches": 1}


@dataclass(frozen=True)
class Training:
    """A training.

    Attributes:
        sends_every: windows between two updates of the second peer that can be fetched.
        batch: sequences of an inner step.
    """

    method: str
    k: int
    bits: int
    learning_rate: float
    sends_every: int = 1
    batch: int = GRID.batch
    rounds: int = GRID.rounds


TRAININGS = (
    Training("muon-grouped", 128, 1, 1.6e-2),
    Training("muon-grouped", 128, 1, 1.6e-2, batch=1),
    Training("muon-grouped", 128, 1, 1.6e-2, batch=64, rounds=20),
    Training("muon-grouped", 128, 1, 1.6e-2, sends_every=8),
    Training("muon-grouped", 128, 1, 1e-3),
    Training("muon-grouped", 128, 1, 1e-3, sends_every=8),
    Training("sparseloco", 64, 2, 8e-3),
    Training("sparseloco", 64, 2, 8e-3, batch=1),
    Training("sparseloco", 64, 2, 8e-3, sends_every=8),
    Training("sparseloco", 64, 2, 1e-3),
    Training("sparseloco", 64, 2, 1e-3, sends_every=8),
    Training("demo", 64, 2, 4e-3),
    Training("demo", 64, 2, 4e-3, batch=1),
    Training("demo", 64, 2, 4e-3, batch=64, rounds=20),
    Training("demo", 64, 2, 4e-3, sends_every=8),
)


def shares(training: Training) -> Iterator[float]:
    """Train; yield each window's longest update, over the largest honest norm."""
    grid = replace(GRID, batch=training.batch, rounds=training.rounds)
    expected = 0.1 if training.method == "muon-grouped" else 0.0  # as in the shipped files
    decay = 0.999 if training.method == "demo" else 0.95
    rates = {"lr": training.learning_rate, "outer": 1.0, "decay": decay, "momentum": 0.9, "expected": expected}
    hparams = make_hparams(grid, Cell("", "final", training.method, training.k, training.bits, json.dumps(rates), 0))
    model = build_model(hparams, "cpu")
    parameters = dict(model.named_parameters())
    everyone = outer_scheme(parameters, hparams)
    peers = [
        (local_training(parameters, hparams), outer_scheme(parameters, hparams), every)
        for every in (1, training.sends_every)
    ]
    _, rounds = batches_of(grid, load_tokens(grid, ()), 0)
    for step, batches in enumerate(rounds):
        updates, gradient = [], 0.0
        for uid, ((local, outer, every), own) in enumerate(zip(peers, batches, strict=True)):
            work = local.run(model, own, step=step, expect=partial(outer.expected_step, own=None, step=step))
            gradient = gradient or math.hypot(*(float(one.norm()) for one in work.tensors.values()))
            body = outer.pack(work.tensors, step=step, window=step, uid=uid, **ABOUT)
            if (step + 1) % every:
                outer.restore(body, window=step, uid=uid)
            else:
                updates.append(parse(body, everyone.spec, window=step, uid=uid))
        tensors = everyone.spec.tensors
        norms = [math.hypot(*map(update.norm, tensors)) for update in updates]
        yield max(norms) / everyone.largest_norm(step, gradient=gradient)
        everyone.apply(updates, step=step)


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for training in TRAININGS:
        found = sorted(shares(training))
        rows.append(asdict(training) | {"median": round(found[len(found) // 2], 4), "largest": round(found[-1], 4)})
        print(rows[-1], flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
