"""Measures the time and memory that an evaluation of one uid adds to its forward passes.

Time: ``evaluate`` against its forward passes (assigned pages twice, held-out pages once). Both run one after the other
in alternating order, so that a busy machine slows both equally. Each ratio is within one repetition.

Memory: peak bytes of tensors, NumPy and Python in a pass with the trial step, less those of a plain pass, plus the
packed update; at most a copy of the weights, the largest tensor and the update. It is measured over a validator's
batch, and over two tokens, where decoding cannot reuse memory of the forward pass.

Exit status 1 if a median or the memory over two tokens is above its limit.

    python scripts/benchmarks/evaluation.py [--repetitions 7] [--quick]

Writes ``docs/benchmarks/evaluation.csv`` and ``evaluation.png``, and prints the medians.
"""

import argparse
import csv
import statistics
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import redraw
from pictures_training import EVALUATION_LIMIT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplr.compress.payload import Update, parse
from tplr.hparams import HParams, load_hparams
from tplr.training.evaluation import baseline, evaluate, sequence_losses, trial_step_applied
from tplr.training.model import build_model
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
# Sequences and tokens of a batch; in production 6 x 2048.
BATCHES = ((4, 512), (6, 1024), (6, 2048))
# A pass with so little memory of its own that all memory of decoding is measured.
SHORT = np.zeros((1, 1, 2), dtype=np.int64)
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}


def constants(scheme: str) -> HParams:
    """The shipped constants of a scheme, with a smaller model."""
    files = {"demo": ROOT / "hparams-demo.json", "sparseloco": ROOT / "hparams-sparseloco.json"}
    shipped = load_hparams(files[scheme])
    return shipped.model_copy(update={"model": shipped.model.model_copy(update=MODEL), "precision": "float32"})


class Live(TorchDispatchMode):
    """Records the peak bytes of tensors created while the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                # A view of existing memory, such as that of a parameter, is not new memory.
                if storage._cdata not in self._known | given:
                    self._known.add(storage._cdata)
                    self.bytes += storage.nbytes()
                    self.most = max(self.most, self.bytes)
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def some_update(outer: OuterScheme, parameters: dict[str, torch.Tensor]) -> Update:
    """Return an update of random gradients; its decoded size is that of any update."""
    gradients = {name: torch.randn_like(one) for name, one in parameters.items()}
    body = outer.pack(gradients, step=1, window=1, uid=1, pages_digest="0" * 64, batches=1)
    return parse(body, outer.spec, window=1, uid=1)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(scheme: str, sequences: int, tokens: int, repetitions: int) -> dict[str, Any]:
    """Return one row of the table."""
    hparams = constants(scheme)
    model = build_model(hparams)
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    outer = outer_scheme(parameters, hparams)
    update = some_update(outer, parameters)
    batch = np.random.default_rng(0).integers(0, MODEL["vocab_size"], (1, sequences, tokens))
    random = baseline(model, batch, "float32")

    def needed() -> None:
        for _ in range(3):
            sequence_losses(model, batch, "float32")

    def evaluated() -> None:
        evaluate(model, outer, update, step=1, assigned=batch, held_out=random, precision="float32")

    ratios, times = [], []
    for repetition in range(repetitions):
        order = (needed, evaluated) if repetition % 2 else (evaluated, needed)
        took = {work: seconds(work) for work in order}
        ratios.append(took[evaluated] / took[needed])
        times.append(took[evaluated])
    largest = max(4 * one.numel() for one in parameters.values())
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "scheme": scheme,
        "sequences": sequences,
        "tokens": tokens,
        "seconds a uid": statistics.median(times),
        "over forward passes": quartiles[1],
        "lower quartile": quartiles[0],
        "upper quartile": quartiles[2],
        "model MB": sum(4 * one.numel() for one in parameters.values()) / 1e6,
        "largest tensor + update MB": (largest + len(update.body)) / 1e6,
        "extra memory MB": extra_memory(model, outer, update, batch) / 1e6,
        "without a batch's own MB": extra_memory(model, outer, update, SHORT) / 1e6,
    }


def extra_memory(model: Any, outer: OuterScheme, update: Update, batch: np.ndarray) -> int:
    """Return the peak bytes of a pass with the trial step over ``batch``, minus those of a plain pass, plus the
    update's bytes."""

    def with_trial_step() -> None:
        with trial_step_applied(model, outer, update, step=1):
            sequence_losses(model, batch, "float32")

    plain = most_alive(lambda: sequence_losses(model, batch, "float32"))
    return most_alive(with_trial_step) - plain + len(update.body)


def most_alive(work: Callable[[], object]) -> int:
    """Return the peak bytes of tensors plus the peak bytes of NumPy and Python, as if both occurred at once.

    The first pass fills caches, which all passes share; they are not counted.
    """
    work()
    with Live() as live:
        work()
    tracemalloc.start()
    work()
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return live.most + traced


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the smallest batch alone; writes nothing")
    given = parser.parse_args()
    rows = []
    for scheme in ("demo", "sparseloco"):
        for sequences, tokens in BATCHES[:1] if given.quick else BATCHES:
            rows.append(measure(scheme, sequences, tokens, given.repetitions))
            print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    good = all(
        row["over forward passes"] <= EVALUATION_LIMIT
        and row["without a batch's own MB"] <= row["model MB"] + row["largest tensor + update MB"]
        for row in rows
    )
    if given.quick:
        return 0 if good else 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "evaluation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    redraw("evaluation")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
