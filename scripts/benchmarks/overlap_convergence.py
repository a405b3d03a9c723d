"""Measures the loss cost of overlap: ``outer_delay`` 1 against 0, with equal tokens, on the grid of ``convergence.py``.

With 1, a round begins without the set of the previous round, which arrives after some of its inner steps (``arrives``).
Until then a peer trains from its prediction of the agreed model, by one of these guesses:

- ``none``: the current agreed model;
- ``own X``: a share X of the step along its own last update;
- ``last X``: a share X of the agreed model's last step, as a guess of all peers' updates;
- ``change X``: a share X of the whole change by its own last training, of which its update sends a small part;
- ``own X, last Y``: both.

With ``--expected``, peers train from weights that are also moved by that share of the step along their error feedback.

Peers use the nodes' own code: ``InnerLoop`` is paused when the set arrives, like in a miner.

    python scripts/benchmarks/overlap_convergence.py                 # 64 rounds
    python scripts/benchmarks/overlap_convergence.py --rounds 500 --layers 1 --inner-steps 5 --batch 4 --arrives 2
    python scripts/benchmarks/overlap_convergence.py --inner-steps 6 --only     # training without overlap

Appends each finished cell to ``docs/benchmarks/overlap.csv`` and skips existing ones. ``--report`` prints the table.
"""

import argparse
import csv
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from convergence import RESULTS as CONVERGENCE
from convergence import read_rows, spread
from convergence_cell import batches_of, comparable_model, make_hparams
from convergence_grid import GRIDS, GROUPED, Cell
from convergence_text import load_tokens
from pictures import redraw

from tplr.compress.payload import Update, parse
from tplr.hparams import HParams
from tplr.training.inner import InnerLoop
from tplr.training.local import LocalWork, Unfinished
from tplr.training.loss import mean_loss
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

RESULTS = CONVERGENCE.with_name("overlap.csv")
BITS = 1
IN_TURN = "outer_delay 0"
# The rates that convergence.py finds for each method.
MUON = {"lr": 0.016, "momentum": 0.9}
SETTINGS = {
    "sparseloco": {"lr": 0.008},
    "muon-sparseloco": MUON,
    GROUPED: MUON,
}


@dataclass(frozen=True)
class OverlapCell:
    """One training.

    Attributes:
        k: number of sent entries out of 4096.
        batch: sequences of an inner step.
        arrives: inner step of a round before which the previous round's set is applied.
        expected: share of the step along the error feedback by which a peer moves the weights before it trains.
        outer_rate: outer learning rate, and those at later rounds: "2.0 64:2.0 128:1.4".
        decay: of the error feedback.
    """

    method: str
    k: int
    layers: int
    rounds: int
    inner_steps: int
    batch: int
    arrives: int
    guess: str
    expected: float
    outer_rate: str
    decay: float
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the cell in ``convergence.py``."""
        first, *later = self.outer_rate.split()
        points = [(int(step), float(rate)) for step, rate in (point.split(":") for point in later)]
        rates = {"outer": float(first), "points": points, "decay": self.decay}
        return SETTINGS[self.method] | rates | {"expected": self.expected}


class Peers:
    """All peers of a run, which share one model: each finds it agreed, and leaves it so."""

    def __init__(self, hparams: HParams, model: Any, count: int, guess: str) -> None:
        self.parameters = dict(model.named_parameters())
        self.everyone = outer_scheme(self.parameters, hparams)
        self._model = model
        self._loops = [InnerLoop(self.parameters, hparams) for _ in range(count)]
        self._outers: list[OuterScheme] = [outer_scheme(self.parameters, hparams) for _ in range(count)]
        parts = [part.split() for part in guess.split(",")] if guess not in ("none", IN_TURN) else []
        self._shares = {name: float(share) for name, share in parts}
        self._last: dict[str, torch.Tensor] = {}
        self._sent: list[Update] = []  # of the round before, until they are applied
        self._changes: list[Mapping[str, torch.Tensor]] = []  # before minus after, of the trainings that made them
        self._steps = 0

    def run(self, uid: int, own: np.ndarray, pause_after: int, unfinished: Unfinished | None) -> LocalWork:
        asked = iter([False] * pause_after)
        position = self._steps + len(self._sent[:1])
        return self._loops[uid].run(
            self._model,
            own,
            step=position,
            pause=lambda: next(asked, True),
            expect=partial(self._expect, uid),
            unfinished=unfinished,
        )

    @torch.no_grad()
    def _expect(self, uid: int, sign: int) -> None:
        self._outers[uid].expected_step(sign, None, step=self._steps)
        if not self._sent:
            return
        if share := self._shares.get("own"):
            self.everyone.trial_step(self._sent[uid], step=self._steps, share=sign * share)
        for guess, tensors in (("last", self._last), ("change", self._changes[uid])):
            for name, one in tensors.items() if guess in self._shares else ():
                self.parameters[name].add_(one, alpha=-sign * self._shares[guess])

    @property
    def behind(self) -> bool:
        """Whether a set is not applied yet."""
        return bool(self._sent)

    def pack(self, round_: int, works: list[LocalWork]) -> list[Update]:
        sent = []
        for uid, (outer, work) in enumerate(zip(self._outers, works, strict=True)):
            about = {"step": round_, "window": round_, "uid": uid, "pages_digest": "0" * 64, "batches": 1}
            body = outer.pack(work.tensors, **about)
            sent.append(parse(body, self.everyone.spec, window=round_, uid=uid))
        return sent

    def receive(self, sent: list[Update], works: list[LocalWork]) -> None:
        self._sent, self._changes = sent, [work.tensors for work in works]

    def apply(self) -> None:
        before = {name: one.detach().clone() for name, one in self.parameters.items()}
        self.everyone.apply(self._sent, step=self._steps)
        self._last = {name: before[name] - one.detach() for name, one in self.parameters.items()}
        self._steps += 1
        self._sent = []


def train(model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: OverlapCell) -> None:
    """All rounds; at the end everything is applied."""
    peers: Peers | None = None
    for number, batches in enumerate(rounds):
        peers = peers or Peers(hparams, model, len(batches), cell.guess)
        inner_steps = batches.shape[1]
        pause_after = cell.arrives if peers.behind else inner_steps
        works = [peers.run(uid, own, pause_after, None) for uid, own in enumerate(batches)]
        if peers.behind and cell.arrives < inner_steps:
            peers.apply()
            works = [peers.run(uid, own, inner_steps, works[uid].unfinished) for uid, own in enumerate(batches)]
        sent = peers.pack(number, works)
        if peers.behind:
            peers.apply()
        peers.receive(sent, works)
        if cell.guess == IN_TURN:
            peers.apply()
    if peers and peers.behind:
        peers.apply()


def run_cell(cell: OverlapCell) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.process_time()
    sizes = {name: getattr(cell, name) for name in ("layers", "rounds", "inner_steps", "batch")}
    grid = replace(GRIDS["reduced"], **sizes)
    one = Cell("overlap", "final", cell.method, cell.k, BITS, json.dumps(cell.settings), cell.seed)
    held_out, rounds = batches_of(grid, load_tokens(grid), cell.seed)
    hparams = make_hparams(grid, one)
    model = comparable_model(hparams)
    train(model, hparams, rounds, cell)
    return asdict(cell) | {
        "loss": round(mean_loss(model, held_out), 5),
        "tokens": grid.rounds * grid.peers * grid.inner_steps * grid.batch * grid.sequence,
        "seconds": round(time.process_time() - began, 1),
    }


def print_table(rows: list[dict[str, str]]) -> None:
    """Print losses, and their excess over those of ``outer_delay`` 0 with the same tokens, seed by seed."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        numbers = (int(row[name]) for name in ("k", "layers", "rounds", "batch", "inner_steps", "arrives"))
        rates = (float(row["expected"]), row["outer_rate"], float(row["decay"]))
        found.setdefault((row["method"], *rates, *numbers, row["guess"]), {})[row["seed"]] = float(row["loss"])
    titles = (
        "method, k",
        "share of error feedback, outer rate, decay",
        "layers",
        "rounds",
        "inner steps",
        "the set comes after",
        "guess",
        "seeds",
        "final loss",
        "more",
    )
    print("|", " | ".join(titles), "|")
    print("|---" * len(titles) + "|")
    for place, losses in sorted(found.items()):
        method, expected, rate, decay, k, layers, rounds, batch, inner_steps, arrives, guess = place
        base = found.get((*place[:9], 0, IN_TURN), {})
        gaps = [losses[seed] - base[seed] for seed in sorted(losses.keys() & base.keys())]
        gap = f"{statistics.mean(gaps):+.3f} ± {spread(gaps):.3f}" if gaps and guess != IN_TURN else ""
        mean, seeds = statistics.mean(losses.values()), ", ".join(sorted(losses))
        size = f"{inner_steps} on {batch} sequences"
        cells = (
            f"{method}, {k}",
            f"{expected:g}, {rate}, {decay:g}",
            layers,
            rounds,
            size,
            f"{arrives} steps",
            guess,
            seeds,
            f"{mean:.3f}",
            gap,
        )
        print("|", " | ".join(map(str, cells)), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences of an inner step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=["muon-sparseloco"])
    parser.add_argument("--k", type=int, default=88, help="of 4096 entries")
    parser.add_argument("--arrives", type=int, nargs="+", default=[4], help="inner steps before the set comes")
    parser.add_argument("--expected", type=float, default=0.0, help="share of the step along the error feedback")
    parser.add_argument(
        "--outer-rate", nargs="+", default=["1.0"], help="first outer rate, and ROUND:RATE of later ones"
    )
    parser.add_argument("--decay", type=float, default=0.95, help="of the error feedback")
    parser.add_argument("--only", nargs="*", help="these guesses", default=["none", "own 0.25", "own 1"])
    parser.add_argument("--report", action="store_true", help="only the table of what is there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV to append to (default: %(default)s)")
    given = parser.parse_args()
    cells = [
        OverlapCell(
            method,
            given.k,
            given.layers,
            given.rounds,
            given.inner_steps,
            given.batch,
            arrives,
            guess,
            given.expected,
            " ".join(given.outer_rate),
            given.decay,
            seed,
        )
        for seed in given.seeds
        for method in given.methods
        for arrives, guess in [(0, IN_TURN), *((at, guess) for guess in given.only for at in given.arrives)]
    ]
    identity = [field.name for field in fields(OverlapCell)]
    done = {tuple(row[name] for name in identity) for row in read_rows(given.results)}
    for cell in () if given.report else cells:
        if tuple(map(str, asdict(cell).values())) in done:
            continue
        row = run_cell(cell)
        print(row, flush=True)
        new = not given.results.exists()
        with given.results.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
    print_table(read_rows(given.results))
    redraw("overlap", given.results)


if __name__ == "__main__":
    main()
