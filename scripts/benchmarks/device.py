"""Speed and memory of the training engine on one device, against plain PyTorch and against the memory's bandwidth.

- ``train``: a window's training, and beside it the same model in a plain loop: layers compiled by ``torch.compile``,
  all logits at once, one backward pass for each batch, nothing that reads from the device. Runs alternate.
- ``train 8B``: a window of SparseLoCo of an 8B model, with H = 30, full checkpointing and both offloads.
- ``pack``, ``apply``: one miner's update, and a step along 15 of them, in milliseconds per million parameters.
  ``limit`` is the time to move the bytes that the step must read and write, at the bandwidth of a copy in the same run:
  12 bytes a parameter to pack (the work, and the error feedback twice), 8 to apply (the weights twice).
- ``evaluate``: an evaluation of one update, against the forward passes that it consists of.

Model FLOPs utilisation is as in ``docs/engine.md``, of the peak of dense bfloat16 products.

    PYTHONPATH=src python scripts/benchmarks/device.py [--repetitions 5] [--only train apply] [--out FILE]

Needs torch, transformers and pydantic. On a GPU it takes minutes and replaces that device's rows in
``docs/benchmarks/device.csv``. Without one it writes rows that say ``not measured``, and rows of a toy model on the
CPU, which show that the script runs and say nothing of a GPU.
"""

import argparse
import csv
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import torch.nn.functional as F

from tplr.compress.payload import Update, parse
from tplr.hparams import HParams, load_hparams
from tplr.training.device import DeviceSettings
from tplr.training.evaluation import baseline, evaluate, sequence_losses
from tplr.training.layers import decoder_layers, prepare_layers
from tplr.training.model import meta_model
from tplr.training.schemes import local_training, outer_scheme

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "device.csv"
FIELDS: tuple[str, ...] = ("row", "variant", "device", "model", "repetition", "value", "unit")
PEERS = 15
PEAKS = {"H100 80GB HBM3": 989.5e12, "H200": 989.5e12}  # by a part of the device's name; PCIe variants are slower
PACK_BYTES, APPLY_BYTES = 12, 8
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
GPU_ROWS = {
    "train": ("plain loop", "engine"),
    "train 8B": ("engine", "peak memory"),
    "pack": ("limit", "engine"),
    "apply": ("limit", "engine"),
    "evaluate": ("forward passes", "engine"),
}


class Bench:
    """One device, and the rows measured on it."""

    def __init__(self, device: torch.device, repetitions: int) -> None:
        self.device = device
        self.repetitions = repetitions
        self.on_gpu = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.on_gpu else "cpu (toy model)"
        self.peak = next((peak for key, peak in PEAKS.items() if key in self.name), None)
        self.rows: list[dict[str, Any]] = []

    def add(
        self, row: str, variant: str, value: float | str, unit: str, *, model: str = "", repetition: int = 0
    ) -> None:
        shown = f"{value:.5g}" if isinstance(value, float) else value
        values = (row, variant, self.name, model, repetition, shown, unit)
        self.rows.append(dict(zip(FIELDS, values, strict=True)))
        print(*values, sep=", ", flush=True)

    def seconds(self, what: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        what()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def model(self, hparams: HParams, settings: DeviceSettings) -> Any:
        """Random weights drawn on the device: speed does not depend on them."""
        model = meta_model(hparams)
        prepare_layers(model, settings)
        model.to_empty(device=self.device)
        model.tie_weights()
        model.init_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        return model.float().eval()

    def batches(self, hparams: HParams, count: int) -> np.ndarray:
        shape = (count, hparams.batch_size, hparams.sequence_length)
        return np.random.default_rng(0).integers(0, hparams.model.vocab_size, shape)


def constants(bench: Bench, scheme: str, *, large: bool = False, **changes: Any) -> HParams:
    """The run of ``hparams.json`` or ``hparams-sparseloco.json``; on the CPU a toy model of the same shape."""
    name = "hparams.json" if scheme == "demo" else "hparams-sparseloco.json"
    raw = load_hparams(ROOT / name).model_dump()
    if large:
        raw["model"] |= LLAMA_8B
    if not bench.on_gpu:
        raw["model"] |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        raw |= {"sequence_length": 64, "batch_size": 2, "precision": "float32"}
    for key, value in changes.items():
        (raw[scheme] if key in raw[scheme] else raw)[key] = value
    return HParams.model_validate(raw)


def flops_per_token(hparams: HParams) -> float:
    """``6 * matmul parameters + 12 * layers * heads * head size * sequence length``; see ``planner/workload.py``."""
    model = meta_model(hparams)
    matmul = sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Linear))
    m = hparams.model
    return 6.0 * matmul + 12 * m.num_hidden_layers * m.num_attention_heads * m.head_size * hparams.sequence_length


def size_name(model: Any) -> str:
    return f"{sum(one.numel() for one in model.parameters()) / 1e9:.3g}B"


def train(bench: Bench) -> None:
    hparams = constants(bench, "demo", batch_size=8 if bench.on_gpu else 2)
    settings = DeviceSettings.of(bench.device)
    batches = bench.batches(hparams, 12 if bench.on_gpu else 3)
    model = bench.model(hparams, settings)
    local = local_training(dict(model.named_parameters()), hparams, settings)
    plain_model = bench.model(hparams, DeviceSettings())
    if settings.compile:
        for layer in decoder_layers(plain_model):
            layer.compile(dynamic=False)
    contenders = {
        "plain loop": functools.partial(plain_loop, plain_model, batches, hparams),
        "engine": functools.partial(local.run, model, batches, step=0),
    }
    for run in contenders.values():
        run()  # compiles, and fills the allocator
    per_token = flops_per_token(hparams)
    for repetition in range(bench.repetitions):
        for variant, run in contenders.items():
            rate = batches.size / bench.seconds(run)
            bench.add("train", variant, rate, "tokens/s", model=size_name(model), repetition=repetition)
            if bench.peak:
                bench.add(
                    "train",
                    variant,
                    rate * per_token / bench.peak,
                    "MFU",
                    model=size_name(model),
                    repetition=repetition,
                )


def plain_loop(model: Any, batches: np.ndarray, hparams: HParams) -> None:
    """What anyone would write: no blocks of rows, no check of losses."""
    model.zero_grad(set_to_none=True)
    device = model.device
    total = torch.zeros((), device=device)
    for batch in batches:
        ids = torch.from_numpy(batch).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=hparams.precision == "bfloat16"):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        parameter.grad.div_(len(batches))
    model.zero_grad(set_to_none=True)


def train_8b(bench: Bench) -> None:
    per_step = 2 if bench.on_gpu else 1
    size = {"batch_size": 4 if bench.on_gpu else 1}
    hparams = constants(bench, "sparseloco", large=True, inner_steps=30, batches_per_inner_step=per_step, **size)
    settings = DeviceSettings.of(bench.device, checkpointing="full", offload_weights=True, offload_error_feedback=True)
    model = bench.model(hparams, settings)
    parameters = dict(model.named_parameters())
    local, outer = local_training(parameters, hparams, settings), outer_scheme(parameters, hparams, settings)
    warm, batches = bench.batches(hparams, 2 * per_step), bench.batches(hparams, 30 * per_step)
    local.run(model, warm, step=0)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    work: list[Any] = []
    rate = batches.size / bench.seconds(lambda: work.append(local.run(model, batches, step=1)))
    name = size_name(model)
    bench.add("train 8B", "engine", rate, "tokens/s", model=name, repetition=0)
    if bench.peak:
        bench.add("train 8B", "engine", rate * flops_per_token(hparams) / bench.peak, "MFU", model=name, repetition=0)
    if bench.on_gpu:
        bench.add(
            "train 8B",
            "peak memory",
            torch.cuda.max_memory_allocated(bench.device) / 2**30,
            "GiB",
            model=name,
            repetition=0,
        )
    packed(outer, work[0].tensors, window=1, uid=1)
    if bench.on_gpu:
        peak = torch.cuda.max_memory_allocated(bench.device) / 2**30
        bench.add("train 8B", "peak memory with packing", peak, "GiB", model=name, repetition=0)


def packed(outer: Any, tensors: dict[str, torch.Tensor], *, window: int, uid: int) -> Update:
    return parse(pack(outer, tensors, window=window, uid=uid), outer.spec, window=window, uid=uid)


def pack(outer: Any, tensors: dict[str, torch.Tensor], *, window: int, uid: int) -> bytes:
    return outer.pack(tensors, step=window, window=window, uid=uid, pages_digest="0" * 64, batches=1)


def exchange(bench: Bench) -> None:
    """Pack, apply and evaluate, for both schemes."""
    for scheme in ("demo", "sparseloco"):
        hparams = constants(bench, scheme)
        model = bench.model(hparams, DeviceSettings())
        name = f"{size_name(model)} {scheme}"
        parameters = dict(model.named_parameters())
        outer = outer_scheme(parameters, hparams)
        work = {key: torch.randn_like(one) for key, one in parameters.items()}
        updates = [packed(outer, work, window=1, uid=uid) for uid in range(PEERS)]
        millions = sum(one.numel() for one in parameters.values()) / 1e6
        outer.apply(updates, step=1)  # fills the allocator
        for repetition in range(bench.repetitions):
            per_byte = copy_seconds(bench)
            for row, number, run in (
                ("pack", PACK_BYTES, functools.partial(pack, outer, work, window=2 + repetition, uid=1)),
                ("apply", APPLY_BYTES, functools.partial(outer.apply, updates, step=1)),
            ):
                bench.add(row, "limit", 1e9 * number * per_byte, "ms/Mparam", model=name, repetition=repetition)
                bench.add(
                    row, "engine", 1e3 * bench.seconds(run) / millions, "ms/Mparam", model=name, repetition=repetition
                )
        del work
        measure_evaluation(bench, hparams, model, outer, updates[0])


def copy_seconds(bench: Bench) -> float:
    """Seconds that the device takes to read or write a byte, by a copy: each byte of it is read and written."""
    source = torch.ones(2**28 if bench.on_gpu else 2**22, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = statistics.median(bench.seconds(lambda: target.copy_(source)) for _ in range(5))
    return seconds / (2 * source.nbytes)


def measure_evaluation(bench: Bench, hparams: HParams, model: Any, outer: Any, update: Update) -> None:
    name = f"{size_name(model)} {hparams.outer}"
    pages = bench.batches(hparams, 6 if bench.on_gpu else 2)
    held_out = baseline(model, pages, hparams.precision)
    forward = functools.partial(sequence_losses, model, pages, hparams.precision)
    whole = functools.partial(
        evaluate, model, outer, update, step=1, assigned=pages, held_out=held_out, precision=hparams.precision
    )
    whole()
    for repetition in range(bench.repetitions):
        # Before and after on the assigned pages, and after on the held-out pages.
        bench.add("evaluate", "forward passes", 3 * bench.seconds(forward), "s", model=name, repetition=repetition)
        bench.add("evaluate", "engine", bench.seconds(whole), "s", model=name, repetition=repetition)


PARTS = {"train": train, "exchange": exchange, "train 8B": train_8b}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.repetitions)
    if not bench.on_gpu:
        for row, variants in GPU_ROWS.items():
            for variant in variants:
                bench.rows.append(dict(zip(FIELDS, (row, variant, "GPU", "", "", "not measured", ""), strict=True)))
    for name in args.only:
        try:
            PARTS[name](bench)
        except torch.cuda.OutOfMemoryError as error:
            bench.add(name, "engine", "does not fit", str(error).splitlines()[0], model="", repetition=0)
        gc.collect()
        if bench.on_gpu:
            torch.cuda.empty_cache()
    write(args.out, bench)
    print(json.dumps(medians(bench.rows), indent=1))


def write(path: Path, bench: Bench) -> None:
    """Replace this device's rows. Rows that say ``not measured`` go when a GPU has measured."""
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["device"] not in (bench.name, "GPU")]
    measured = any("cpu" not in row["device"] for row in kept)
    rows = [row for row in bench.rows if not (measured and row["device"] == "GPU")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows([*kept, *rows])


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["value"] not in ("not measured", "does not fit"):
            found.setdefault(f"{row['row']}, {row['variant']}, {row['model']}, {row['unit']}", []).append(
                float(row["value"])
            )
    return {key: statistics.median(values) for key, values in found.items()}


if __name__ == "__main__":
    main()
