"""Measures the cost of a window's evidence: inner products of all updates, and the resulting credit.

    python scripts/benchmarks/credit.py [--millions 1040] [--updates 256] [--window]

First it aligns 256 updates of a model of a billion parameters, with all pairs, and computes credit and scores of 20
such windows: seconds and extra memory, with the default constants and with DeMo's. The gradient is zeros, which cost
the same as any values; bodies are those of four random updates. With ``--window``, it measures the processor time of a
window's measures for 20 updates on the localnet's model and on a larger one, in each scheme: the parts of inner
products, proofs of sync and scores, of the gradient after half of the step, of the calibrations, and of the backward
pass. Prints all figures and writes them to ``docs/benchmarks/credit.csv``.
"""

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from compress import SIZES, extra_memory, llama

from tplr.compress.layout import TensorSpec
from tplr.compress.payload import Coefficients, Update, build, parse
from tplr.hparams import HParams, load_hparams
from tplr.localnet.plan import Scheme
from tplr.localnet.simulation import profile
from tplr.schemas import VALID, Evidence, PeerObservation, published
from tplr.schemas import Alignment as PublishedAlignment
from tplr.scoring.board import Board
from tplr.scoring.credit import credit
from tplr.scoring.selection import UIDS_PER_LOSS_EVALUATION
from tplr.training.alignment import Alignment, align, probe_gradient
from tplr.training.evaluation import baseline, evaluate, half_step_taken
from tplr.training.fingerprint import fingerprint
from tplr.training.model import build_model
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "benchmarks" / "credit.csv"
MODELS = SIZES | {1040: (32_000, 2048, 5504, 18)}
PRODUCTION: dict[Scheme, str] = {"muon": "hparams.json", "demo": "hparams-demo.json"}
WINDOWS, DIFFERENT, TILE, REPEATS = 20, 4, 32, 5
LISTED, BATCHES = 20, 8
LARGER = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
META = {"window": 1, "pages_digest": "0" * 64, "batches": 1}
Row = dict[str, float | str]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the processor time in seconds."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def some_update(outer: OuterScheme, seed: int) -> bytes:
    """Return a body of random coordinates and values, which repeat every ``TILE`` chunks."""
    random, made = np.random.default_rng(seed), {}
    for name, tensor in outer.spec.tensors.items():
        made[name] = _tiled(random, tensor)
    return build(made, outer.spec, uid=0, **META)


def _tiled(random: np.random.Generator, tensor: TensorSpec) -> Coefficients:
    chunks, entries, k = tensor.grid.chunks, tensor.grid.entries, tensor.k
    some = min(chunks, TILE)
    if tensor.grouped:
        indices = random.integers(entries // k, size=(some, k)) * k + np.arange(k)
    else:
        indices = np.sort(random.random((some, entries)).argsort(axis=1)[:, :k], axis=1)
    repeats = -(-chunks // some)
    tiled = torch.from_numpy(indices).repeat(repeats, 1)[:chunks]
    return tiled, torch.from_numpy(random.standard_normal((chunks, k))).float()


def large(scheme: Scheme, millions: int, count: int) -> list[Row]:
    """Measure inner products and credit of many updates, with production's constants."""
    hparams = load_hparams(ROOT / PRODUCTION[scheme])
    # Memory that is never touched: the values of parameters and gradient are not read.
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
    wall_scores, used_scores = scores_of(found[0], hparams)
    what = f"{scheme}, {count} updates of {sum(map(np.prod, shapes.values())) / 1e6:.0f} million parameters"
    return [
        {"what": f"{what}: inner products", "seconds": wall, "processor seconds": used, "extra MB": memory / 1e6},
        {"what": f"{what}: credit of 20 windows", "seconds": wall_credit, "processor seconds": used_credit},
        {"what": f"{what}: all scores of 20 windows", "seconds": wall_scores, "processor seconds": used_scores},
    ]


def scores_of(one: Alignment, hparams: HParams) -> tuple[float, float]:
    """Return the wall time and the processor time of the draw and the scores after ``WINDOWS`` windows like this one.

    In each window, ``uids_per_window`` miners take the own-pages test.
    """
    random, board = np.random.default_rng(0), Board(hparams.model_copy(update={"pay_windows": WINDOWS}))

    def evidence(window: int) -> Evidence:
        sampled = random.choice(one.uids, hparams.uids_per_window, replace=False)
        tests = {int(uid): published(random.uniform(0.2, 0.4, len(one.uids))) for uid in sampled}
        products, middle = (published(random.uniform(0.2, 0.4, len(one.uids))) for _ in range(2))
        return Evidence(
            window=window,
            observations={
                str(uid): PeerObservation(
                    hotkey=str(uid),
                    listed=True,
                    included=True,
                    verdict=VALID,
                    sampled=uid in tests,
                    assigned_pages=True,
                    assigned_products=tests.get(uid, ()),
                    behind=0,
                )
                for uid in one.uids
            },
            alignment=PublishedAlignment(
                uids=one.uids,
                products=products,
                middle=middle,
                norms=one.norms,
                gram=published(one.gram),
                unit=one.unit,
            ),
        )

    for window in range(WINDOWS - 1):
        board.see(evidence(window))
    last, pool = evidence(WINDOWS - 1), {uid: str(uid) for uid in one.uids}

    def draw_and_see() -> None:
        board.sample(pool, last.window, seed=0)
        board.see(last)

    return measured(draw_and_see)


def window(scheme: Scheme, name: str, **model_changes: int) -> list[Row]:
    """Measure the processor time of one window's measures of 20 updates, with as many tests and calibrations as in
    production.

    All passes are over ``BATCHES`` batches.
    """
    hparams = profile(scheme)
    hparams = hparams.model_copy(update={"model": hparams.model.model_copy(update=model_changes)})
    name, tested = f"{name}, {scheme}", hparams.uids_per_window
    evaluated = -(-tested // UIDS_PER_LOSS_EVALUATION)
    model = build_model(hparams)
    parameters = dict(model.named_parameters())
    outer = outer_scheme(parameters, hparams)
    updates = []
    for uid in range(LISTED):
        gradients = {name: torch.randn_like(one) for name, one in parameters.items()}
        body = outer_scheme(parameters, hparams).pack(gradients, step=1, uid=uid, **META)
        updates.append(parse(body, outer.spec, window=1, uid=uid))
    outer.set_caps(updates, step=1)
    shape = (BATCHES, hparams.batch_size, hparams.sequence_length)
    batches = np.random.default_rng(0).integers(0, hparams.model.vocab_size, shape)
    held_out = baseline(model, batches, "float32")
    gradient = probe_gradient(model, batches, "float32").tensors
    found = align(outer, gradient, updates, step=1, seed=0)

    def after_half_of_the_step() -> None:
        with half_step_taken(model, outer, updates, step=1):
            middle = probe_gradient(model, held_out.for_middle(), "float32").tensors
        align(outer, middle, updates, step=1, seed=0, pairs=False)

    steps: dict[str, Callable[[], object]] = {
        "forward pass on the probe pages": lambda: baseline(model, batches, "float32"),
        "forward and backward pass": lambda: probe_gradient(model, batches, "float32"),
        "inner products of 20 updates": lambda: align(outer, gradient, updates, step=1, seed=0),
        "inner products with one own-pages gradient": lambda: align(
            outer, gradient, updates, step=1, seed=0, pairs=False
        ),
        "gradient after half of the step, and its inner products": after_half_of_the_step,
        "calibration of one update": lambda: evaluate(
            model, outer, updates[0], step=1, assigned=None, held_out=held_out, precision="float32"
        ),
        "proofs of sync of 20 miners": lambda: [
            fingerprint(parameters, step=1, seed=seed, samples=hparams.fingerprint_samples) for seed in range(LISTED)
        ],
        "checking 20 updates": lambda: [parse(one.body, outer.spec, window=1, uid=one.uid) for one in updates],
        "outer step": lambda: outer.apply(updates, step=1),
    }
    used = {what: min(measured(work)[1] for _ in range(REPEATS)) for what, work in steps.items()}
    used["scores by 20 windows"] = min(scores_of(found, hparams)[1] for _ in range(REPEATS))
    forward, both, pairs, own, middle, deep, proofs, check, step, scores = used.values()
    whole = both + pairs + middle + tested * (both + own) + evaluated * deep + proofs + check + step + scores
    rows: list[Row] = [{"what": f"{name}: {what}", "processor seconds": one} for what, one in used.items()]
    text = f"{name}: of a window with {tested} tests and {evaluated} calibrations, % of its processor time:"
    rows += [
        {"what": f"{text} products, proofs and scores", "percent": 100 * (pairs + proofs + scores) / whole},
        {"what": f"{text} products of the tests", "percent": 100 * tested * own / whole},
        {"what": f"{text} passes of the tests", "percent": 100 * tested * both / whole},
        {"what": f"{text} the gradient after half of the step", "percent": 100 * middle / whole},
        {"what": f"{text} calibrations", "percent": 100 * evaluated * deep / whole},
        {
            "what": f"{text} all but the probe pages' passes and the tests",
            "percent": 100 * (pairs + proofs + scores + middle + evaluated * deep) / whole,
        },
        {"what": f"{name}: both passes over the forward pass", "ratio": both / forward},
    ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, choices=MODELS, default=1040)
    parser.add_argument("--updates", type=int, default=256)
    parser.add_argument("--window", action="store_true")
    given = parser.parse_args()
    if given.window:
        torch.set_num_threads(1)
        rows = []
        for scheme in get_args(Scheme):
            rows += [*window(scheme, "localnet's model"), *window(scheme, "9 million parameters", **LARGER)]
    else:
        torch.set_num_threads(1)  # the products are NumPy's, on one thread
        rows = [row for scheme in PRODUCTION for row in large(scheme, given.millions, given.updates)]
    for row in rows:
        print(
            "  ".join(f"{key} {one:.3f}" if isinstance(one, float) else str(one) for key, one in row.items()),
            flush=True,
        )
    old = [] if not TABLE.exists() else list(csv.DictReader(TABLE.open()))
    fresh = {str(row["what"]) for row in rows}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["what", "seconds", "processor seconds", "extra MB", "percent", "ratio"])
        writer.writeheader()
        writer.writerows([*(row for row in old if row["what"] not in fresh), *rows])


if __name__ == "__main__":
    main()
