"""Measures speed and memory of the training engine on one device, against plain PyTorch and the memory bandwidth.

- ``train``: a window's training, compared with the same model in a plain loop: layers compiled by ``torch.compile``,
  all logits at once, one backward pass for each batch, no reads from the device. If torchtitan is there, its
  Llama of equal shape as it trains on one GPU: autocast, each layer and the loss compiled. Runs alternate.
- ``train 8B``: a window of SparseLoCo of an 8B model, with H = 30, full checkpointing and both offloads; then packing.
  The device's peak memory is compared with the planner's figure.
- ``inner step``: a step of the inner optimizer without its backward pass, in milliseconds per million parameters:
  AdamW; and Muon, compared with ``torch.optim.Muon`` with the same AdamW for the other tensors, also for 117M
  parameters, where PyTorch starts an operation for each of many small matrices. ``limit``: AdamW must
  move 28 bytes a parameter, Muon 20 and compute the products of its five iterations at the device's peak.
- ``pack``, ``apply``: one miner's update, and a step along 15 of them, in milliseconds per million parameters.
  ``limit`` is the time to move the bytes that the step must read and write, at the bandwidth of a copy in the same run:
  12 bytes a parameter to pack (the work, and the error feedback twice), 8 to apply (the weights twice). ``to host``:
  bytes a parameter that a profiler saw copied from the device; a dense tensor would be 4.
- ``evaluate``: an evaluation of one update, against the forward passes that it consists of.

Model FLOPs utilisation is as in ``docs/engine.md``, of the peak of dense bfloat16 products.

    PYTHONPATH=src python scripts/benchmarks/device.py [--repetitions 5] [--only train exchange] [--out FILE]

Needs torch, transformers, pydantic, blake3 and python-dotenv. On a GPU each part takes minutes and replaces that
device's rows of this part in ``docs/benchmarks/device.csv``; rows that no GPU has measured say ``not measured``.
Without a GPU it runs a toy model on the CPU with a GPU's settings, which shows that the script runs, but nothing about
a GPU. ``device.png`` is drawn if matplotlib is installed.

For torchtitan, unpack the wheel of version 0.2.0 (``pip download --no-deps torchtitan==0.2.0``) and add the folder to
``PYTHONPATH``. Its other dependencies are not needed.
"""

import argparse
import csv
import functools
import gc
import importlib.util
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from convergence_grid import GRIDS
from pictures import redraw
from plain_training import compile_layers, cross_entropy, plain_loop, torchtitan_llama
from torch.profiler import ProfilerActivity, profile

from tplr.compress.payload import Update, parse
from tplr.hparams import HParams, load_hparams
from tplr.planner.memory import device_memory
from tplr.planner.workload import Workload
from tplr.training.device import DeviceSettings
from tplr.training.evaluation import baseline, evaluate, sequence_losses
from tplr.training.inner_optimizers import ITERATIONS, InnerOptimizer, is_hidden_matrix
from tplr.training.layers import decoder_layers, prepare_layers
from tplr.training.model import meta_model, set_first_weights
from tplr.training.parallel import SINGLE_PROCESS
from tplr.training.schemes import local_training, outer_scheme

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "device.csv"
FIELDS: tuple[str, ...] = ("row", "variant", "device", "model", "repetition", "value", "unit")
PEERS = 15
PEAKS = {"H100 80GB HBM3": 989.5e12, "H200": 989.5e12}  # keys are parts of the device's name; PCIe variants are slower
PACK_BYTES, APPLY_BYTES = 12, 8
ADAMW_BYTES, MUON_BYTES = (
    28,
    20,
)  # float32 weights, gradient and moments: each is read, and all but the gradient written
FILES = {"muon": "hparams.json", "sparseloco": "hparams-sparseloco.json", "demo": "hparams-demo.json"}
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = GRIDS["gpu"].model  # 117M parameters, in matrices for which a GPU waits for the host one by one
TOY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TOY_8B = TOY | {"vocab_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
NOT_MEASURED, NO_FIT = "not measured", "does not fit"
# Rows that a GPU should measure: variants and units by row.
GPU_ROWS = {
    "train": (("plain loop", "MFU"), ("engine", "MFU"), ("torchtitan", "MFU")),
    "train 8B": (("engine", "MFU"), ("engine", "GiB"), ("planner", "GiB")),
    "inner step": (("limit", "ms/Mparam"), ("PyTorch", "ms/Mparam"), ("engine", "ms/Mparam")),
    "pack": (("limit", "ms/Mparam"), ("engine", "ms/Mparam"), ("to host", "bytes/param")),
    "apply": (("limit", "ms/Mparam"), ("engine", "ms/Mparam"), ("to host", "bytes/param")),
    "evaluate": (("forward passes", "s"), ("engine", "s")),
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

    def add_rate(self, row: str, variant: str, rate: float, hparams: HParams, *, model: str, repetition: int) -> None:
        """Tokens per second, and the utilisation that follows on a known device."""
        self.add(row, variant, rate, "tokens/s", model=model, repetition=repetition)
        if self.peak:
            mfu = rate * flops_per_token(hparams) / self.peak
            self.add(row, variant, mfu, "MFU", model=model, repetition=repetition)

    def seconds(self, what: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        what()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def settings(self, **changes: Any) -> DeviceSettings:
        """Return a GPU's settings, also for the toy model on a CPU."""
        return DeviceSettings.of("cuda", **changes)

    def forget(self) -> None:
        """Release compiled code and allocations of the last part."""
        torch._dynamo.reset()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def used_gib(self) -> float | None:
        """Return the device's peak memory since ``forget``: the allocator's, and memory outside of it."""
        if not self.on_gpu:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        outside = total - free - torch.cuda.memory_reserved(self.device)
        return (torch.cuda.max_memory_reserved(self.device) + outside) / 2**30

    def model(self, hparams: HParams, settings: DeviceSettings) -> Any:
        """Random weights drawn on the device: speed does not depend on them."""
        model = meta_model(hparams)
        prepare_layers(model, settings)
        model.to_empty(device=self.device)
        model.tie_weights()
        set_first_weights(dict(model.named_buffers()), hparams)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        return model.eval()

    def batches(self, hparams: HParams, count: int) -> np.ndarray:
        shape = (count, hparams.batch_size, hparams.sequence_length)
        return np.random.default_rng(0).integers(0, hparams.model.vocab_size, shape)


def constants(
    bench: Bench, scheme: str, *, shape: Mapping[str, int] | None = None, toy: Mapping[str, int] = TOY, **changes: Any
) -> HParams:
    """The run of one of ``FILES`` with another shape of the model if given; on the CPU a toy model."""
    raw = load_hparams(ROOT / FILES[scheme]).model_dump()
    raw["model"] |= (shape or {}) if bench.on_gpu else toy
    if not bench.on_gpu:
        raw |= {"sequence_length": 64, "batch_size": 2}
    of_scheme = raw[raw["outer"]]
    for key, value in changes.items():
        (of_scheme if key in of_scheme else raw)[key] = value
    return HParams.model_validate(raw)


def flops_per_token(hparams: HParams) -> float:
    """``6 * matmul parameters + 12 * layers * heads * head size * sequence length``; see ``planner/workload.py``."""
    return Workload.of(hparams).flops_per_token


def size_name(model: Any) -> str:
    return f"{sum(one.numel() for one in model.parameters()) / 1e9:.3g}B"


def train(bench: Bench) -> None:
    hparams = constants(bench, "demo", batch_size=8 if bench.on_gpu else 2)
    settings = bench.settings()
    batches = bench.batches(hparams, 12 if bench.on_gpu else 3)
    model = bench.model(hparams, settings)
    local = local_training(dict(model.named_parameters()), hparams, settings)
    plain_model = bench.model(hparams, DeviceSettings())
    compile_layers(decoder_layers(plain_model))
    logits = functools.partial(_logits, plain_model)
    contenders: dict[str, Callable[[], float]] = {
        "plain loop": functools.partial(plain_loop, plain_model, logits, cross_entropy, batches, hparams),
        "engine": lambda: local.run(model, batches, step=0).train_stats.loss,
    }
    if titan := torchtitan_llama(bench.device, hparams):
        compiled = torch.compile(cross_entropy)
        contenders["torchtitan"] = functools.partial(plain_loop, titan, titan, compiled, batches, hparams)
    for variant, run in contenders.items():
        if not math.isfinite(loss := run()):  # compiles, and fills the allocator
            raise RuntimeError(f"{variant}: loss {loss}")
    for repetition in range(bench.repetitions):
        for variant, run in contenders.items():
            rate = batches.size / bench.seconds(run)
            bench.add_rate("train", variant, rate, hparams, model=size_name(model), repetition=repetition)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def train_8b(bench: Bench) -> None:
    per_step = 2 if bench.on_gpu else 1
    size = {"batch_size": 4 if bench.on_gpu else 1}
    hparams = constants(
        bench, "sparseloco", shape=LLAMA_8B, toy=TOY_8B, inner_steps=30, batches_per_inner_step=per_step, **size
    )
    settings = bench.settings(checkpointing="full", loss_rows=1024, offload_weights=True, offload_error_feedback=True)
    model = bench.model(hparams, settings)
    parameters = dict(model.named_parameters())
    local, outer = local_training(parameters, hparams, settings), outer_scheme(parameters, hparams, settings)
    warm, batches = bench.batches(hparams, 2 * per_step), bench.batches(hparams, 30 * per_step)
    local.run(model, warm, step=0)
    work: list[Any] = []
    rate = batches.size / bench.seconds(lambda: work.append(local.run(model, batches, step=1)))
    if not math.isfinite(loss := work[0].train_stats.loss):
        raise RuntimeError(f"8B: loss {loss}")
    name = size_name(model)
    bench.add_rate("train 8B", "engine", rate, hparams, model=name, repetition=0)
    seconds = bench.seconds(functools.partial(packed, outer, work.pop().tensors, window=1, uid=1))
    bench.add("train 8B", "pack", seconds, "s", model=name)
    planned = device_memory(Workload.of(hparams), "miner", settings, ranks=1, on_cpu=not bench.on_gpu).peak
    bench.add("train 8B", "planner", planned / 2**30, "GiB", model=name)
    if (used := bench.used_gib()) is not None:
        bench.add("train 8B", "engine", used, "GiB", model=name)


def inner_step(bench: Bench) -> None:
    for scheme, label, shape in (("sparseloco", "AdamW", None), ("muon", "Muon", None), ("muon", "Muon", SMALL)):
        if shape and not bench.on_gpu:
            continue
        hparams, settings = constants(bench, scheme, shape=shape), bench.settings()
        assert hparams.sparseloco is not None
        model = bench.model(hparams, settings)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer = InnerOptimizer(parameters, hparams.sparseloco, hparams.precision, settings, SINGLE_PROCESS)
        optimizer.begin(model)
        matrices = {name for name, one in parameters.items() if label == "Muon" and is_hidden_matrix(name, one.shape)}
        contenders: dict[str, Callable[[], Any]] = {"engine": functools.partial(optimizer.step, 1e-3)}
        if matrices:
            contenders["PyTorch"] = pytorch_muon(parameters, matrices, settings)
        for run in contenders.values():
            run()  # fills the allocator
        millions, name = sum(one.numel() for one in parameters.values()) / 1e6, f"{size_name(model)} {label}"
        for repetition in range(bench.repetitions):
            about: dict[str, Any] = {"model": name, "repetition": repetition}
            if label == "AdamW" or bench.peak:
                limit = step_limit(parameters, matrices, copy_seconds(bench), bench.peak or 1.0)
                bench.add("inner step", "limit", 1e3 * limit / millions, "ms/Mparam", **about)
            for variant, run in contenders.items():
                bench.add("inner step", variant, 1e3 * bench.seconds(run) / millions, "ms/Mparam", **about)
        del optimizer, contenders, model, parameters


def pytorch_muon(
    parameters: dict[str, torch.nn.Parameter], matrices: set[str], settings: DeviceSettings
) -> Callable[[], None]:
    """Return a step of PyTorch's own Muon for ``matrices``, and of its AdamW for the other tensors."""
    muon = torch.optim.Muon([parameters[name] for name in sorted(matrices)], lr=1e-3, adjust_lr_fn="match_rms_adamw")
    others = [one for name, one in parameters.items() if name not in matrices]
    adamw = torch.optim.AdamW(others, lr=1e-3, fused=settings.fused_adamw)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def step_limit(parameters: dict[str, torch.nn.Parameter], matrices: set[str], per_byte: float, peak: float) -> float:
    """Return the seconds of a step that memory and matrix products need at least; ``peak`` in FLOP/s."""
    seconds = 0.0
    for name, one in parameters.items():
        seconds += per_byte * one.numel() * (MUON_BYTES if name in matrices else ADAMW_BYTES)
        if name in matrices:
            small, large = sorted(one.shape)
            seconds += ITERATIONS * (4 * small**2 * large + 2 * small**3) / peak
    return seconds


def packed(outer: Any, tensors: dict[str, torch.Tensor], *, window: int, uid: int) -> Update:
    return parse(pack(outer, tensors, window=window, uid=uid), outer.spec, window=window, uid=uid)


def pack(outer: Any, tensors: dict[str, torch.Tensor], *, window: int, uid: int) -> bytes:
    return outer.pack(tensors, step=window, window=window, uid=uid, pages_digest="0" * 64, batches=1)


def exchange(bench: Bench) -> None:
    """Pack, apply and evaluate, with each of ``FILES``."""
    for scheme in FILES:
        hparams = constants(bench, scheme)
        model = bench.model(hparams, bench.settings())
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
                if bench.on_gpu and repetition == 0:
                    bench.add(row, "to host", bytes_to_host(run) / millions / 1e6, "bytes/param", model=name)
        del work
        measure_evaluation(bench, hparams, model, outer, updates[0], name=name)


def copy_seconds(bench: Bench) -> float:
    """Return the seconds that the device takes to read or write a byte, from a copy, which reads and writes each
    byte."""
    source = torch.ones(2**28 if bench.on_gpu else 2**22, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = statistics.median(bench.seconds(lambda: target.copy_(source)) for _ in range(5))
    return seconds / (2 * source.nbytes)


def bytes_to_host(run: Callable[[], Any]) -> int:
    """Return the bytes that ``run`` copies from a GPU to the host, measured by a profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return copied_to_host(json.loads(trace.read_text()))


def copied_to_host(trace: dict[str, Any]) -> int:
    """Return the bytes of the copies from device to host in a trace of PyTorch's profiler."""
    copies = [one for one in trace["traceEvents"] if one.get("cat") == "gpu_memcpy" and "DtoH" in one["name"]]
    return sum(int(one["args"]["bytes"]) for one in copies)


def measure_evaluation(bench: Bench, hparams: HParams, model: Any, outer: Any, update: Update, *, name: str) -> None:
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


PARTS = {"train": train, "inner step": inner_step, "exchange": exchange, "train 8B": train_8b}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.repetitions)
    for name in args.only:
        bench.forget()
        try:
            PARTS[name](bench)
        except torch.OutOfMemoryError as error:
            print(error)
            bench.add(name, "engine", NO_FIT, "GiB")
        write(args.out, bench)  # after each part: a later one may fail
    print(json.dumps(medians(bench.rows), indent=1))
    if importlib.util.find_spec("matplotlib"):
        redraw("device", args.out)


def write(path: Path, bench: Bench) -> None:
    """Replace this device's rows of the parts that were measured, and say which rows no GPU has measured."""
    kept: list[dict[str, Any]] = []
    done = {row["row"] for row in bench.rows}
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["device"] != "GPU"]
        kept = [row for row in kept if row["device"] != bench.name or row["row"] not in done]
    found = [*kept, *bench.rows]
    on_gpus = {(row["row"], row["variant"], row["unit"]) for row in found if not row["device"].startswith("cpu")}
    missing = [
        dict(zip(FIELDS, (row, variant, "GPU", "", "", NOT_MEASURED, unit), strict=True))
        for row, variants in GPU_ROWS.items()
        for variant, unit in variants
        if (row, variant, unit) not in on_gpus
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows([*missing, *found])


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["value"] not in (NOT_MEASURED, NO_FIT):
            name = f"{row['row']}, {row['variant']}, {row['model']}, {row['unit']}"
            found.setdefault(name, []).append(float(row["value"]))
    return {key: statistics.median(values) for key, values in found.items()}


if __name__ == "__main__":
    main()
