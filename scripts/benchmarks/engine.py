"""Measures the cost of one model on several ranks, and verifies that its bytes are equal for any number of ranks.

Ranks are processes of ``torchrun`` on this machine's CPU, over gloo.

- Bytes: of all tensors that live between two windows of a SparseLoCo miner with outer momentum, on the rank with the
  most, against 1/N of one process's and the largest tensor.
- Failure detection: a command that does nothing (its header, its end on all ranks) against an inner step. This cost is
  per command, not per step.
- Equality: the digest after 20 windows with the same updates.

Exit status 1 if a limit is exceeded.

    python scripts/benchmarks/engine.py [--repetitions 5] [--ranks 1,2,4]

Writes ``docs/benchmarks/engine.csv`` and ``engine.png``.
"""

import argparse
import csv
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import redraw

from tplr.compress.payload import parse
from tplr.hparams import HParams, load_hparams
from tplr.node.train_state import TrainState
from tplr.training.commands import Commands, command
from tplr.training.model import build_model
from tplr.training.parallel import local_rows
from tplr.training.schemes import outer_scheme
from tplr.training.sharded import joined_process_group

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
BYTES_LIMIT, DETECTION_LIMIT = 1.1, 0.01
WINDOWS, SENDERS = 20, 3
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
META = {"pages_digest": "0" * 64, "batches": 1}


class Measured(TrainState):
    """A training state that counts its tensors."""

    @command
    def nothing(self) -> None:
        """A command without work."""

    @command
    def bytes_of_ranks(self) -> list[int]:
        gc.collect()
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta]
        parts = [local_rows(one.detach())[0].untyped_storage() for one in tensors]
        alive = {part.data_ptr(): part.nbytes() for part in parts}
        return [int(one) for one in self._parallel.gather_bytes(str(sum(alive.values())).encode())]


def constants() -> HParams:
    hparams = load_hparams(ROOT / "hparams-sparseloco.json")
    assert hparams.sparseloco is not None
    steps = {"inner_steps": 2, "batches_per_inner_step": 4, "outer_momentum": 0.9}
    return hparams.model_copy(
        update={
            "model": hparams.model.model_copy(update=MODEL),
            "sparseloco": hparams.sparseloco.model_copy(update=steps),
            "precision": "float32",
        }
    )


def measure(state: Measured, hparams: HParams, repetitions: int) -> dict[str, Any]:
    """On rank 0: bytes by rank, seconds of steps and of commands, digests."""
    batches = np.random.default_rng(0).integers(0, MODEL["vocab_size"], (8, 2, 128))
    steps, commands = [], []
    state.train(batches, 0)
    for _ in range(repetitions):
        began = time.perf_counter()
        state.train(batches, 0)
        steps.append((time.perf_counter() - began) / 2)
        began = time.perf_counter()
        for _ in range(20):
            state.nothing()
        commands.append((time.perf_counter() - began) / 20)
    state.pack(window=0, uid=9, **META)
    found: dict[str, Any] = {
        "bytes": state.bytes_of_ranks(),
        "largest": max(4 * one.numel() for one in state.parameters.values()),
        "step": steps,
        "command": commands,
    }
    for window in range(WINDOWS):
        state.apply(updates(state, hparams, window))
    return found | {"digest": state.digest()}


def updates(state: TrainState, hparams: HParams, window: int) -> list:
    plain = {name: torch.zeros(one.shape) for name, one in sorted(state.parameters.items())}
    found = []
    for uid in range(SENDERS):
        chance = torch.Generator().manual_seed(SENDERS * window + uid)
        work = {name: 0.01 * torch.randn(one.shape, generator=chance) for name, one in plain.items()}
        body = outer_scheme(plain, hparams).pack(work, step=window, window=window, uid=uid, **META)
        found.append(parse(body, state.spec, window=window, uid=uid))
    return found


def rank_main(result: Path, repetitions: int) -> None:
    """Run one process of ``torchrun``."""
    torch.set_num_threads(1)
    hparams, timeout = constants(), datetime.timedelta(seconds=600)
    with joined_process_group(torch.device("cpu"), timeout) as parallel:
        commands = Commands(parallel, timeout)
        state = Measured(build_model(hparams, "cpu", parallel), hparams, result.parent, commands=commands)
        if parallel.rank != 0:
            commands.serve(state)
            return
        result.write_text(json.dumps(measure(state, hparams, repetitions)))
        commands.end()


def run(ranks: int, repetitions: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        subprocess.run([*launch, "--result", str(result), "--repetitions", str(repetitions)], check=True)
        return json.loads(result.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, the first of which is 1")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(given.result, given.repetitions)
        return 0
    found = {ranks: run(ranks, given.repetitions) for ranks in map(int, given.ranks.split(","))}
    alone, rows = found[1], []
    for ranks, one in found.items():
        step, idle = statistics.median(one["step"]), statistics.median(one["command"])
        rows.append(
            {
                "ranks": ranks,
                "MB on the fullest rank": round(max(one["bytes"]) / 1e6, 3),
                "MB of a share and the largest tensor": round((alone["bytes"][0] / ranks + alone["largest"]) / 1e6, 3),
                "step ms": round(1e3 * step, 3),
                "command ms": round(1e3 * idle, 3),
                "command over step": round(idle / step, 5),
                "equal bytes": one["digest"] == alone["digest"],
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    with (FOLDER / "engine.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    redraw("engine")
    good = all(
        row["equal bytes"]
        and row["MB on the fullest rank"] <= BYTES_LIMIT * row["MB of a share and the largest tensor"]
        and row["command over step"] <= DETECTION_LIMIT
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
