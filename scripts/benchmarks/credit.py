"""Measures what the evidence of a window costs: inner products of all updates, and the credit that follows.

    python scripts/benchmarks/credit.py [--millions 1040] [--updates 256] [--window]

First, align 256 updates of a model of a billion parameters, all pairs among them, and credit of 20 such windows:
seconds and extra memory. The gradient is zeros, which cost the same as any values; bodies are of four random updates.

With ``--window``, the processor time of a window's measures for 20 updates on the localnet's model and on a larger one:
how much of it the inner products are, and the backward pass. Prints all figures and writes them to
``docs/benchmarks/credit.csv``.
"""

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from compress import SIZES, extra_memory, llama

from tplr.compress.payload import Coefficients, Update, build, parse
from tplr.hparams import HParams, load_hparams
from tplr.localnet.simulation import profile
from tplr.scoring.credit import credit
from tplr.training.alignment import Alignment, align, probe_gradient
from tplr.training.evaluation import baseline, evaluate
from tplr.training.model import build_model
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "benchmarks" / "credit.csv"
MODELS = SIZES | {1040: (32_000, 2048, 5504, 18)}
WINDOWS, DIFFERENT, TILE = 20, 4, 32
LISTED, SAMPLED, BATCHES = 20, 4, 8
LARGER = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
META = {"window": 1, "pages_digest": "0" * 64, "batches": 1}
Row = dict[str, float | str]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def some_update(outer: OuterScheme, seed: int) -> bytes:
    """A body of random coordinates and values, which repeat every ``TILE`` chunks."""
    random, made = np.random.default_rng(seed), {}
    for name, tensor in outer.spec.tensors.items():
        made[name] = _tiled(random, tensor.grid.chunks, tensor.grid.entries, tensor.k)
    return build(made, outer.spec, uid=0, **META)


def _tiled(random: np.random.Generator, chunks: int, entries: int, k: int) -> Coefficients:
    some = min(chunks, TILE)
    indices = np.sort(random.random((some, entries)).argsort(axis=1)[:, :k], axis=1)
    repeats = -(-chunks // some)
    tiled = torch.from_numpy(indices).repeat(repeats, 1)[:chunks]
    return tiled, torch.from_numpy(random.standard_normal((chunks, k))).float()


def large(hparams: HParams, millions: int, count: int) -> list[Row]:
    """Inner products and credit of many updates."""
    # Memory that is never touched: neither parameters nor gradient are read for their values.
    shapes = llama(*MODELS[millions])
    outer = outer_scheme({name: torch.empty(shape) for name, shape in shapes.items()}, hparams)
    bodies = [parse(some_update(outer, seed), outer.spec, window=1, uid=0).body for seed in range(DIFFERENT)]
    updates = [Update(spec=outer.spec, uid=uid, body=bodies[uid % DIFFERENT], **META) for uid in range(count)]
    gradient = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    found: list[Alignment] = []

    def inner_products() -> None:
        found.append(align(outer, gradient, updates, step=1, seed=len(found)))

    random = np.random.default_rng(0)
    wall, used = measured(inner_products)
    memory = extra_memory(inner_products)
    windows = [found[0]._replace(products=tuple(random.uniform(0.2, 0.4, count))) for _ in range(WINDOWS)]
    counted = [dict.fromkeys(found[0].uids, True)] * WINDOWS
    wall_credit, used_credit = measured(lambda: credit(windows, counted))
    what = f"{hparams.outer}, {count} updates of {sum(map(np.prod, shapes.values())) / 1e6:.0f} million parameters"
    return [
        {"what": f"{what}: inner products", "seconds": wall, "processor seconds": used, "extra MB": memory / 1e6},
        {"what": f"{what}: credit of 20 windows", "seconds": wall_credit, "processor seconds": used_credit},
    ]


def window(hparams: HParams, name: str) -> list[Row]:
    """Processor time of the measures of one window with 20 updates, 4 of which are sampled."""
    model = build_model(hparams)
    parameters = dict(model.named_parameters())
    outer = outer_scheme(parameters, hparams)
    updates = []
    for uid in range(LISTED):
        gradients = {name: torch.randn_like(one) for name, one in parameters.items()}
        body = outer_scheme(parameters, hparams).pack(gradients, step=1, uid=uid, **META)
        updates.append(parse(body, outer.spec, window=1, uid=uid))
    shape = (BATCHES, hparams.batch_size, hparams.sequence_length)
    batches = np.random.default_rng(0).integers(0, hparams.model.vocab_size, shape)
    held_out = baseline(model, batches, "float32")
    gradient = probe_gradient(model, batches, "float32").tensors
    steps: dict[str, Callable[[], object]] = {
        "forward pass on the probe pages": lambda: baseline(model, batches, "float32"),
        "forward and backward pass": lambda: probe_gradient(model, batches, "float32"),
        "inner products of 20 updates": lambda: align(outer, gradient, updates, step=1, seed=0),
        "inner products with one own-pages gradient": lambda: align(
            outer, gradient, updates, step=1, seed=0, pairs=False
        ),
        "deep evaluation of one update": lambda: evaluate(
            model, outer, updates[0], step=1, assigned=batches, held_out=held_out, precision="float32"
        ),
        "checking 20 updates": lambda: [parse(one.body, outer.spec, window=1, uid=one.uid) for one in updates],
        "outer step": lambda: outer.apply(updates, step=1),
    }
    used = {what: min(measured(work)[1] for _ in range(2)) for what, work in steps.items()}
    forward, both, pairs, own, deep, check, step = used.values()
    whole = both + pairs + SAMPLED * (both + own + deep) + check + step
    rows: list[Row] = [{"what": f"{name}: {what}", "processor seconds": one} for what, one in used.items()]
    share = 100 * (pairs + SAMPLED * own) / whole
    text = f"{name}: inner products of a window with {SAMPLED} sampled, % of its processor time"
    rows.append({"what": text, "percent": share})
    rows.append({"what": f"{name}: both passes over the forward pass", "ratio": both / forward})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, choices=MODELS, default=1040)
    parser.add_argument("--updates", type=int, default=256)
    parser.add_argument("--window", action="store_true")
    given = parser.parse_args()
    demo = profile("demo")
    if given.window:
        torch.set_num_threads(1)
        wider = demo.model.model_copy(update=LARGER)
        rows = window(demo, "localnet's model") + window(
            demo.model_copy(update={"model": wider}), "9 million parameters"
        )
    else:
        torch.set_num_threads(1)  # the products are NumPy's, on one thread
        rows = large(load_hparams(ROOT / "hparams-demo.json"), given.millions, given.updates)
    for row in rows:
        print("  ".join(f"{key} {one:.3f}" if isinstance(one, float) else str(one) for key, one in row.items()))
    old = [] if not TABLE.exists() else list(csv.DictReader(TABLE.open()))
    fresh = {str(row["what"]) for row in rows}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["what", "seconds", "processor seconds", "extra MB", "percent", "ratio"])
        writer.writeheader()
        writer.writerows([*(row for row in old if row["what"] not in fresh), *rows])


if __name__ == "__main__":
    main()
