"""How well each scheme learns for the bytes it sends: simulated peers in one process, the real code of updates.

All methods get the same first weights, the same batches and the same number of tokens, for each seed:

- ``adamw``: AdamW on the mean gradient of all peers' batches, as one machine with the summed batch would do; a peer
  that took part in it would send its whole gradient, in float32, in every step.
- ``diloco``: H inner AdamW steps on each peer, the mean of the float32 differences, outer SGD with Nesterov momentum
  of 0.9, as published.
- ``averaging``: the same without outer momentum.
- ``sparseloco``: the package's own, over ``k`` of 4096 and bits a value.
- ``muon``, ``muon-averaging``, ``muon-sparseloco``: ``adamw``, ``averaging`` and ``sparseloco`` with Muon for hidden
  matrices, and AdamW for the rest.
- ``muon-grouped``: ``muon-sparseloco`` that sends one entry of each of k groups of a chunk.
- ``demo``: the package's own; every window has two or three batches of each peer.

Before that each method gets the same number of trials (``TRIALS``) of its learning rates, with a seed of their own; the
best one is used for all its cells.

    python scripts/benchmarks/convergence.py --reduced     # about an hour on 2 cores
    python scripts/benchmarks/convergence.py               # a day
    python scripts/benchmarks/convergence.py --grid reduced-16     # 16 peers instead of 4, with the rates found for 8

Appends each finished cell to ``docs/benchmarks/convergence.csv`` and skips those that are there, so it can be stopped
and started at will. Then it prints the table and draws ``convergence.png``. ``--report`` does only that.
"""

import argparse
import csv
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a cell is a process, and there are as many as cores

import numpy as np
import torch
from pictures import redraw

from tplr.compress.payload import parse
from tplr.hparams import HParams
from tplr.localnet.dataset import prepared_corpus
from tplr.localnet.plan import PROFILE
from tplr.training.inner import InnerLoop
from tplr.training.loss import mean_loss
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "convergence.csv"
CACHE = ROOT / ".cache" / "tplr" / "localnet"
COLUMNS = (
    "grid", "purpose", "method", "k", "bits", "settings", "seed",
    "loss", "bytes_per_peer", "parameters", "tokens", "seconds",
)  # fmt: skip
CURVES = RESULTS.with_name("convergence_curves.csv")
CURVE_COLUMNS = (*COLUMNS[:7], "rounds", "tokens", "bytes_per_peer", "loss")
CURVE_POINTS = 8
TUNING_SEED = 100
HELD_OUT_BATCHES = 40


@dataclass(frozen=True)
class Grid:
    """Sizes of a grid; a round is ``inner_steps`` batches on each peer."""

    hidden: int
    layers: int
    vocab: int
    sequence: int
    batch: int
    peers: int
    inner_steps: int
    rounds: int
    demo_batches: int  # of each peer in one of DeMo's windows
    seeds: int
    sparse: tuple[tuple[int, int], ...]  # (k of 4096, bits; 0 for float32)
    muon_sparse: tuple[tuple[int, int], ...]  # the same, of ``muon-sparseloco``
    muon_grouped: tuple[tuple[int, int], ...] = ((128, 1),)  # the same, of ``muon-grouped``
    tuned: str = ""  # the grid whose best rates serve methods without trials here; "": all have trials here
    trials: tuple[str, ...] = ()  # with ``tuned``: the methods that have trials here all the same

    @property
    def steps(self) -> int:
        """Of AdamW; DeMo makes one for ``demo_batches`` of them."""
        return self.rounds * self.inner_steps


GRIDS = {
    "reduced": Grid(
        hidden=64, layers=2, vocab=1024, sequence=64, batch=8, peers=4,
        inner_steps=10, rounds=64, demo_batches=2, seeds=3,
        sparse=((64, 2), (256, 1), (256, 2), (256, 0), (88, 1)),
        muon_sparse=((88, 1), (256, 1), (128, 1), (64, 1)),
    ),
    "full": Grid(
        hidden=128, layers=2, vocab=1024, sequence=64, batch=8, peers=8,
        inner_steps=15, rounds=130, demo_batches=3, seeds=4,
        sparse=tuple((k, bits) for k in (32, 64, 128, 256) for bits in (1, 2, 4, 0)),
        muon_sparse=tuple((k, bits) for k in (32, 64, 88, 128, 256) for bits in (1, 2)),
    ),
}  # fmt: skip
for peers in (8, 16):  # twice and four times the batch, and the tokens; nothing else changes
    GRIDS[f"reduced-{peers}"] = replace(
        GRIDS["reduced"],
        peers=peers,
        sparse=((256, 1),),
        muon_sparse=((88, 1), (256, 1)),
        tuned="reduced" if peers == 8 else "reduced-8",
        trials=("adamw", "diloco", "muon-grouped") if peers == 8 else (),
    )
# The full grid's model, peers and tokens for some methods, in hours: with rates that were found for the reduced one.
GRIDS["full-untuned"] = replace(
    GRIDS["full"], seeds=3, sparse=((256, 1),), muon_sparse=((88, 1), (256, 1)), tuned="reduced-8"
)
# Half as many exchanges of updates twice as large, for the same tokens.
GRIDS["reduced-20-steps"] = replace(
    GRIDS["reduced"], inner_steps=20, rounds=32, sparse=(), muon_sparse=((200, 1),), tuned="reduced"
)
# SparseLoCo's rates are found there and used for all its cells.
GROUPED = "muon-grouped"
TUNED_AT = {"sparseloco": (256, 2), "muon-sparseloco": (96, 1), GROUPED: (128, 1)}

NESTEROV = 0.9
# Six for each method: peak learning rates, and what else its authors tune.
TRIALS: dict[str, list[dict[str, float]]] = {
    "adamw": [{"lr": lr} for lr in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)],
    "diloco": [{"lr": lr, "outer": outer} for lr in (4e-3, 8e-3) for outer in (0.1, 0.2, 0.3)],
    "sparseloco": [{"lr": lr, "outer": outer, "decay": 0.95} for lr in (4e-3, 8e-3) for outer in (0.7, 1.0, 1.4)],
    "averaging": [{"lr": lr, "outer": outer} for lr in (4e-3, 8e-3) for outer in (0.7, 1.0, 1.4)],
    "demo": [{"lr": lr, "decay": decay} for lr in (1e-3, 2e-3, 4e-3) for decay in (0.9, 0.99)],
    "muon-sparseloco": [
        {"lr": 1.6e-2, "outer": 1.0, "decay": 0.95, "momentum": 0.95} | change
        for change in ({}, {"lr": 8e-3}, {"lr": 3.2e-2}, {"outer": 1.4}, {"decay": 0.99}, {"momentum": 0.9})
    ],
    "muon-averaging": [{"lr": lr, "outer": outer} for lr in (8e-3, 1.6e-2) for outer in (0.7, 1.0, 1.4)],
    "muon": [{"lr": lr} for lr in (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)],
}
TRIALS[GROUPED] = TRIALS["muon-sparseloco"]
METHODS = [*TRIALS]
SMALL = 150  # an update is one of so many parts of DiLoCo's, for the verdict
MUON_MOMENTUM = 0.95  # unless a trial has another


@dataclass(frozen=True)
class Cell:
    """One training; all but ``purpose`` identifies it."""

    grid: str
    purpose: str  # tune or final
    method: str
    k: int
    bits: int
    settings: str  # JSON of one of TRIALS
    seed: int


# --- one cell -------------------------------------------------------------------------------------------------------


def load_tokens(grid: Grid) -> np.ndarray:
    """The corpus as (sequences, sequence): rows of both configs, cut as nodes cut them."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    from tplr.pages.packing import batches

    folder = prepared_corpus(CACHE, None, grid.vocab)
    cached = folder / "tokens.npy"
    if not cached.exists():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        rows = [row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path)["text"].to_pylist()]
        ids = [np.array([*ids, tokenizer.eos_token_id], np.int64) for ids in tokenizer(rows)["input_ids"]]
        draft = folder / f"tokens.{os.getpid()}.npy"
        np.save(draft, np.concatenate([ids[i] for i in np.random.default_rng(0).permutation(len(ids))]))
        draft.replace(cached)
    return batches(np.load(cached), 1, grid.sequence)[:, 0]


def batches_of(grid: Grid, sequences: np.ndarray, seed: int) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Held-out batches, alike for all, and for each round (peers, inner_steps, batch, sequence) by seed."""
    kept = HELD_OUT_BATCHES * grid.batch
    held_out = sequences[:kept].reshape(HELD_OUT_BATCHES, grid.batch, grid.sequence)
    size = grid.peers * grid.inner_steps * grid.batch

    def rounds() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        order = np.empty(0, np.int64)
        for _ in range(grid.rounds):
            while len(order) < size:  # a new epoch
                order = np.concatenate([order, kept + rng.permutation(len(sequences) - kept)])
            picked, order = order[:size], order[size:]
            yield sequences[picked].reshape(grid.peers, grid.inner_steps, grid.batch, grid.sequence)

    return held_out, rounds()


def make_hparams(grid: Grid, cell: Cell) -> HParams:
    """Localnet's constants with the cell's model, scheme and rates. Warm-up is a twentieth of all steps."""
    settings: Mapping[str, float] = json.loads(cell.settings)
    raw = json.loads(PROFILE.read_text())
    for remark in ("_", raw["outer"]):
        del raw[remark]
    outer = "demo" if cell.method == "demo" else "sparseloco"
    steps = grid.steps // (grid.demo_batches if outer == "demo" else 1)
    rate = {
        "peak": settings["lr"],
        "warmup_steps": steps // 20,
        "t_max": steps - steps // 20,
        "start_factor": 0.1,
        "floor_factor": 0.1,
    }
    if outer == "demo":
        raw["demo"] = {"learning_rate": rate, "momentum_decay": settings["decay"], "weight_decay": 0.0}
    else:
        raw["sparseloco"] = {
            "inner_steps": grid.inner_steps,
            "batches_per_inner_step": grid.peers if cell.method in ("adamw", "muon") else 1,
            "inner_learning_rate": rate,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.1,
            "gradient_clip_norm": 1.0,
            "error_feedback_decay": settings.get("decay", 0.0),
            "outer_learning_rate": settings.get("outer", 1.0),
            "outer_momentum": 0.0,
            "outer_nesterov": False,
        }
        if cell.method.startswith("muon"):
            raw["sparseloco"] |= {
                "inner_optimizer": "muon",
                "muon_momentum": settings.get("momentum", MUON_MOMENTUM),
            }
    raw |= {
        "outer": outer,
        "topk_compression": cell.k or 64,
        "topk_selection": "group" if cell.method == GROUPED else "chunk",
        "quantization_bits": cell.bits,
        "init_seed": cell.seed,
        "sequence_length": grid.sequence,
    }
    raw["model"] |= {
        "vocab_size": grid.vocab,
        "hidden_size": grid.hidden,
        "intermediate_size": 3 * grid.hidden,
        "num_hidden_layers": grid.layers,
    }
    return HParams.model_validate(raw)


Row = dict[str, Any]


def run_cell(cell: Cell) -> list[Row]:
    """Train, and measure on held-out text; one row of the CSV."""
    return [_train(cell, on_round=lambda *_: None)]


def run_curve(cell: Cell) -> list[Row]:
    """Train, and measure after every eighth of the rounds; rows of the CSV of curves."""
    grid = GRIDS[cell.grid]
    rows: list[Row] = []

    def measure(done: int, loss: Callable[[], float]) -> None:
        if done % (grid.rounds // CURVE_POINTS) == 0:
            rows.append(asdict(cell) | {"rounds": done, "loss": round(loss(), 5)})

    last = _train(cell, on_round=measure)
    rows.append(asdict(cell) | {"rounds": grid.rounds, "loss": last["loss"]})
    for row in rows:
        share = row["rounds"] / grid.rounds
        row |= {"tokens": round(share * last["tokens"]), "bytes_per_peer": round(share * last["bytes_per_peer"])}
    return rows


def _train(cell: Cell, *, on_round: Callable[[int, Callable[[], float]], None]) -> Row:
    """One training. ``on_round`` gets the number of rounds before the last that are done, and a measure of the loss."""
    torch.set_num_threads(1)
    began, grid = time.process_time(), GRIDS[cell.grid]
    held_out, all_rounds = batches_of(grid, load_tokens(grid), cell.seed)
    hparams = make_hparams(grid, cell)
    model = build_model(hparams)

    def rounds() -> Iterator[np.ndarray]:
        for done, batches in enumerate(all_rounds):
            if done:
                on_round(done, lambda: mean_loss(model, held_out))
            yield from in_windows(batches, grid.demo_batches) if cell.method == "demo" else [batches]

    sent = TRAIN.get(cell.method, train_scheme)(model, hparams, rounds(), cell)
    return asdict(cell) | {
        "loss": round(mean_loss(model, held_out), 5),
        "bytes_per_peer": sent,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": grid.rounds * grid.peers * grid.inner_steps * grid.batch * grid.sequence,
        "seconds": round(time.process_time() - began, 1),
    }


@torch.no_grad()
def train_adamw(model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: Cell) -> int:
    """The package's inner loop, never left: each step has a batch of every peer."""
    parameters = dict(model.named_parameters())
    loop, sent = InnerLoop(parameters, hparams), 0
    for step, batches in enumerate(rounds):
        peers, inner_steps = batches.shape[:2]
        in_turn = batches.swapaxes(0, 1).reshape(peers * inner_steps, *batches.shape[2:])
        with torch.enable_grad():
            differences = loop.run(model, in_turn, step=step).tensors
        for name, parameter in parameters.items():
            parameter.sub_(differences[name])
            sent += 4 * parameter.numel() * inner_steps
    return sent


@torch.no_grad()
def train_diloco(model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: Cell) -> int:
    """Dense, in float32, with PyTorch's own outer optimizer."""
    parameters, sent = dict(model.named_parameters()), 0
    momentum, lr = NESTEROV if cell.method == "diloco" else 0.0, json.loads(cell.settings)["outer"]
    outer = torch.optim.SGD(parameters.values(), lr, momentum=momentum, nesterov=momentum > 0)
    loops: list[InnerLoop] = []
    for step, batches in enumerate(rounds):
        loops = loops or [InnerLoop(parameters, hparams) for _ in batches]
        with torch.enable_grad():
            works = [loop.run(model, own, step=step).tensors for loop, own in zip(loops, batches, strict=True)]
        for name, parameter in parameters.items():
            parameter.grad = torch.stack([work[name] for work in works]).mean(dim=0)
            sent += 4 * parameter.numel()
        outer.step()
        outer.zero_grad()
    return sent


def train_scheme(model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: Cell) -> int:
    """What nodes do: train locally, pack, parse everyone's bytes, apply."""
    parameters = dict(model.named_parameters())
    everyone, sent = outer_scheme(parameters, hparams), 0
    peers: list[tuple[Any, Any]] = []
    for step, batches in enumerate(rounds):
        peers = peers or [(local_training(parameters, hparams), outer_scheme(parameters, hparams)) for _ in batches]
        bodies = []
        for uid, ((local, outer), own) in enumerate(zip(peers, batches, strict=True)):
            work = local.run(model, own, step=step)
            about = {
                "step": step,
                "window": step,
                "uid": uid,
                "pages_digest": "0" * 64,
                "batches": work.train_stats.batches,
            }
            bodies.append(outer.pack(work.tensors, **about))
        updates = [parse(body, everyone.spec, window=step, uid=uid) for uid, body in enumerate(bodies)]
        everyone.apply(updates, step=step)
        sent += len(bodies[0])
    return sent


def in_windows(batches: np.ndarray, count: int) -> list[np.ndarray]:
    """A round's (peers, inner_steps, batch, sequence) in windows of ``count`` batches a peer."""
    return np.split(batches, batches.shape[1] // count, axis=1)


TRAIN = {
    "adamw": train_adamw,
    "muon": train_adamw,
    "diloco": train_diloco,
    "averaging": train_diloco,
    "muon-averaging": train_diloco,
}

# --- the grid -------------------------------------------------------------------------------------------------------


def trials(name: str) -> list[Cell]:
    """All cells by which learning rates are found."""
    places, grid = TUNED_AT | {"demo": (64, 2)}, GRIDS[name]
    borrowed = trials(grid.tuned) if grid.tuned else []
    return borrowed + [
        Cell(name, "tune", method, *places.get(method, (0, 0)), json.dumps(settings), TUNING_SEED)
        for method, all_settings in TRIALS.items()
        for settings in all_settings
        if not grid.tuned or method in grid.trials
    ]


def finals(name: str, best: Mapping[str, str]) -> list[Cell]:
    """All cells that are compared, seed by seed, so that a stopped grid is one with fewer seeds."""
    dense = [(method, 0, 0) for method in TRAIN]
    sparse = [(method, *at) for method, every in sparse_places(GRIDS[name]).items() for at in every]
    return [
        Cell(name, "final", method, k, bits, best[method], seed)
        for seed in range(GRIDS[name].seeds)
        for method, k, bits in (*dense, ("demo", 64, 2), *sparse)
        if method in best
    ]


def sparse_places(grid: Grid) -> dict[str, tuple[tuple[int, int], ...]]:
    return {"sparseloco": grid.sparse, "muon-sparseloco": grid.muon_sparse, GROUPED: grid.muon_grouped}


def identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in COLUMNS[:7])


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_cells(cells: list[Cell], path: Path, jobs: int) -> None:
    """Run the cells that are not in ``path`` yet, and append each when it is done."""
    for (row,) in run_missing(cells, path, COLUMNS, run_cell, jobs):
        label = f"{row['purpose']} {row['method']} k={row['k']} bits={row['bits']} {row['settings']}"
        print(f"{label} seed {row['seed']}: {row['loss']} in {row['seconds']} s", flush=True)


def run_curves(cells: list[Cell], path: Path, jobs: int) -> None:
    """The same for the curves."""
    for rows in run_missing(cells, path, CURVE_COLUMNS, run_curve, jobs):
        print(f"{rows[0]['method']} k={rows[0]['k']}: {[row['loss'] for row in rows]}", flush=True)


def run_missing(
    cells: list[Cell], path: Path, columns: Sequence[str], run: Callable[[Cell], list[Row]], jobs: int
) -> Iterator[list[Row]]:
    """Rows of each cell that has none in ``path``; they are appended to it."""
    done = {identity(row) for row in read_rows(path)}
    left = [cell for cell in cells if identity(asdict(cell)) not in done]
    print(f"{len(cells) - len(left)} of {len(cells)} cells are done", flush=True)
    if not left:
        return
    load_tokens(GRIDS[left[0].grid])  # once, before there are processes
    new = not path.exists()
    with path.open("a", newline="") as file, ProcessPoolExecutor(jobs) as pool:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for number, future in enumerate(as_completed([pool.submit(run, cell) for cell in left]), 1):
            rows = future.result()
            writer.writerows(rows)
            file.flush()
            print(f"{number}/{len(left)}", end=" ")
            yield rows


def best_settings(rows: list[dict[str, str]], name: str) -> dict[str, str]:
    """The settings of each method's best trial, on this grid or on the one that serves it; else it is left out."""
    borrowed = best_settings(rows, GRIDS[name].tuned) if GRIDS[name].tuned else {}
    tuned: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["grid"] == name and row["purpose"] == "tune":
            tuned.setdefault(row["method"], []).append(row)
    return borrowed | {
        method: min(tuned[method], key=lambda row: float(row["loss"]))["settings"]
        for method in TRIALS
        if method in tuned
    }


# --- what came of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One method's final losses, by seed."""

    label: str
    losses: dict[int, float]
    bytes_per_peer: int
    bits_per_parameter: float  # of one update

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return spread(list(self.losses.values()))

    def gaps(self, other: "Result") -> list[float]:
        """How much higher the loss is than another method's, seed by seed."""
        return [self.losses[seed] - other.losses[seed] for seed in sorted(self.losses.keys() & other.losses.keys())]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def summarize(rows: list[dict[str, str]], name: str) -> dict[str, Result]:
    """All finished cells by label, the lowest loss first."""
    found: dict[tuple[str, int, int], dict[int, dict[str, str]]] = {}
    for row in rows:
        if row["grid"] == name and row["purpose"] == "final":
            place = (row["method"], int(row["k"]), int(row["bits"]))
            found.setdefault(place, {})[int(row["seed"])] = row
    grid, results = GRIDS[name], []
    for (method, k, bits), by_seed in found.items():
        label = f"{method} k={k}, {f'{bits} bits' if bits else 'float32'}" if k else method
        one = next(iter(by_seed.values()))
        updates = {"adamw": grid.steps, "muon": grid.steps, "demo": grid.steps // grid.demo_batches}.get(
            method, grid.rounds
        )
        losses = {seed: float(row["loss"]) for seed, row in by_seed.items()}
        sent = int(one["bytes_per_peer"])
        results.append(Result(label, losses, sent, 8 * sent / updates / int(one["parameters"])))
    return {one.label: one for one in sorted(results, key=lambda result: result.mean)}


def print_table(results: dict[str, Result]) -> None:
    if not {"diloco", "adamw"} <= results.keys():
        print("no table yet: it compares with diloco and adamw")
        return
    diloco, adamw = results["diloco"], results["adamw"]
    columns = ("method", "final loss (mean ± sd over seeds)", "gap to DiLoCo, same seed", "closes of DiLoCo's to adamw")
    print("|", " | ".join((*columns, "MB sent a peer", "of DiLoCo's", "bits a parameter, an update")), "|")
    print("|---|---|---|---|---|---|---|")
    for one in results.values():
        gaps = one.gaps(diloco)
        same = replace(adamw, losses={seed: adamw.losses[seed] for seed in one.losses})
        closed = statistics.mean(gaps) / statistics.mean(same.gaps(diloco))
        print(
            f"| {one.label} | {one.mean:.3f} ± {one.spread:.3f} | {statistics.mean(gaps):+.3f} ± {spread(gaps):.3f} "
            f"| {closed:.0%} | {one.bytes_per_peer / 1e6:.2f} "
            f"| 1/{diloco.bytes_per_peer / one.bytes_per_peer:.3g} | {one.bits_per_parameter:.3f} |"
        )


def print_verdicts(results: dict[str, Result]) -> None:
    """What the benchmark is for, in three lines."""
    diloco = results.get("diloco")
    small = [
        one
        for one in results.values()
        if diloco and " k=" in one.label and one.bytes_per_peer * SMALL < diloco.bytes_per_peer
    ]
    if not small:
        return
    best = min(small, key=lambda one: one.mean)
    for other in [one for one in ("diloco", "averaging", "adamw") if one in results]:
        gaps = best.gaps(results[other])
        gap, margin = statistics.mean(gaps), spread(gaps)
        verdict = "lower" if gap < -margin else "higher" if gap > margin else "the same within the spread of seeds"
        share = results[other].bytes_per_peer / best.bytes_per_peer
        print(f"{best.label}, 1/{share:.3g} of the bytes of {other}: loss {gap:+.3f} ± {margin:.3f}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, default="full", help="default: %(default)s")
    parser.add_argument("--reduced", dest="grid", action="store_const", const="reduced", help="as --grid reduced")
    parser.add_argument("--curves", action="store_true", help="record the loss along the first seed's cells, no more")
    parser.add_argument("--report", action="store_true", help="only the table and the picture of what is there")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the final cells (default: all of the grid)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at a time (default: one a core)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV to append to (default: %(default)s)")
    given = parser.parse_args()
    name, wanted = given.grid, set(given.methods)
    if given.curves:
        best = best_settings(read_rows(given.results), name)
        cells = [one for one in finals(name, best) if one.method in wanted and one.seed == 0]
        run_curves(cells, CURVES, given.jobs)
        redraw(CURVES.stem)
        return
    if not given.report:
        run_cells([one for one in trials(name) if one.method in wanted], given.results, given.jobs)
        best = best_settings(read_rows(given.results), name)
        seeds = given.seeds or range(GRIDS[name].seeds)
        final = [one for one in finals(name, best) if one.method in wanted and one.seed in seeds]
        run_cells(final, given.results, given.jobs)
    rows = read_rows(given.results)
    print("settings found:", json.dumps({m: json.loads(s) for m, s in best_settings(rows, name).items()}))
    results = summarize(rows, name)
    print_table(results)
    print_verdicts(results)
    redraw("convergence", given.results)


if __name__ == "__main__":
    main()
