"""One cell of ``convergence.py``: a training of one method with one seed."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from convergence_grid import GRIDS, GROUPED, Cell, Grid
from convergence_text import load_tokens

from tplr.compress.payload import parse
from tplr.hparams import HParams
from tplr.localnet.plan import PROFILE
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.inner import InnerLoop
from tplr.training.loss import mean_loss
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

NESTEROV = 0.9
MUON_MOMENTUM = 0.95  # unless a trial has another
HELD_OUT_BATCHES = 40
CURVE_POINTS = 8


@dataclass(frozen=True)
class Machine:
    """Where cells are trained, and on which text; see ``load_tokens``."""

    device: str = "cpu"
    text: Sequence[Path] = ()

    @property
    def settings(self) -> DeviceSettings:
        return DeviceSettings.of(self.device)


def comparable_model(hparams: HParams, *about: Any, **settings: Any) -> Any:
    """Return a new model with the first weights that PyTorch draws, as all recorded rows have them.

    Nodes draw others, which are equal on every processor (``tplr.training.normal_numbers``). PyTorch's are those of
    x86-64 with AVX2 only there.
    """
    with mock.patch("tplr.training.model.PortableNormal", _pytorch_numbers):
        return build_model(hparams, *about, **settings)


@contextmanager
def _pytorch_numbers(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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


def make_hparams(grid: Grid, cell: Cell, device: str = "cpu") -> HParams:
    """Localnet's constants with the cell's model, scheme and rates. Warm-up is a twentieth of all steps."""
    settings: Mapping[str, Any] = json.loads(cell.settings)
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
            "outer_learning_rate_points": [{"step": step, "rate": rate} for step, rate in settings.get("points", ())],
            "outer_momentum": 0.0,
            "outer_nesterov": False,
            "expected_share": settings.get("expected", 0.0),
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
        "precision": "float32" if device == "cpu" else "bfloat16",
    }
    raw["model"] |= grid.model | {
        "max_position_embeddings": max(grid.sequence, raw["model"]["max_position_embeddings"]),
    }
    return HParams.model_validate(raw)


Row = dict[str, Any]


def run_cell(cell: Cell, machine: Machine) -> tuple[Row, list[Row]]:
    """Train, and measure on held-out text; return a row of the CSV, and rows of the CSV of curves.

    The curve has the loss after every eighth of the rounds; only final cells of the first seed have one.
    """
    torch.set_num_threads(1)
    grid, points = GRIDS[cell.grid], {}
    every = grid.rounds // CURVE_POINTS if (cell.purpose, cell.seed) == ("final", 0) else grid.rounds + 1

    def measure(done: int, loss: Callable[[], float]) -> None:
        if done % every == 0:
            points[done] = loss()
            print(
                f"{cell.method}, seed {cell.seed}: round {done} of {grid.rounds}, loss {points[done]:.4f}", flush=True
            )

    row = asdict(cell) | _train(cell, machine, on_round=measure)
    curve = []
    for rounds, loss in ({**points, grid.rounds: row["loss"]} if points else {}).items():
        share = rounds / grid.rounds
        at = {"tokens": round(share * row["tokens"]), "bytes_per_peer": round(share * row["bytes_per_peer"])}
        curve.append(asdict(cell) | at | {"rounds": rounds, "loss": round(loss, 5)})
    return row, curve


def _train(cell: Cell, machine: Machine, *, on_round: Callable[[int, Callable[[], float]], None]) -> Row:
    """Train; ``on_round`` gets the number of finished rounds, but for the last, and a function that measures."""
    clock = time.process_time if machine.device == "cpu" else time.perf_counter
    began, grid = clock(), GRIDS[cell.grid]
    held_out, all_rounds = batches_of(grid, load_tokens(grid, machine.text), cell.seed)
    hparams = make_hparams(grid, cell, machine.device)
    model = comparable_model(hparams, machine.device, settings=machine.settings)

    def loss() -> float:
        return mean_loss(model, held_out, hparams.precision)

    def rounds() -> Iterator[np.ndarray]:
        for done, batches in enumerate(all_rounds):
            if done:
                on_round(done, loss)
            yield from in_windows(batches, grid.demo_batches) if cell.method == "demo" else [batches]

    sent = TRAIN.get(cell.method, train_scheme)(model, hparams, rounds(), cell, machine.settings)
    return {
        "loss": round(loss(), 5),
        "bytes_per_peer": sent,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": grid.rounds * grid.peers * grid.inner_steps * grid.batch * grid.sequence,
        "seconds": round(clock() - began, 1),
    }


@torch.no_grad()
def train_adamw(
    model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: Cell, settings: DeviceSettings = DEFAULTS
) -> int:
    """The package's inner loop, never left: each step has a batch of every peer."""
    parameters = dict(model.named_parameters())
    loop, sent = InnerLoop(parameters, hparams, settings), 0
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
def train_diloco(
    model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: Cell, settings: DeviceSettings = DEFAULTS
) -> int:
    """Dense, in float32, with PyTorch's own outer optimizer."""
    parameters, sent = dict(model.named_parameters()), 0
    momentum, lr = NESTEROV if cell.method == "diloco" else 0.0, json.loads(cell.settings)["outer"]
    outer = torch.optim.SGD(parameters.values(), lr, momentum=momentum, nesterov=momentum > 0)
    loops: list[InnerLoop] = []
    for step, batches in enumerate(rounds):
        loops = loops or [InnerLoop(parameters, hparams, settings) for _ in batches]
        with torch.enable_grad():
            works = [loop.run(model, own, step=step).tensors for loop, own in zip(loops, batches, strict=True)]
        for name, parameter in parameters.items():
            parameter.grad = torch.stack([work[name] for work in works]).mean(dim=0)
            sent += 4 * parameter.numel()
        outer.step()
        outer.zero_grad()
    return sent


def train_scheme(
    model: Any, hparams: HParams, rounds: Iterator[np.ndarray], cell: Cell, settings: DeviceSettings = DEFAULTS
) -> int:
    """What nodes do: train locally, pack, parse everyone's bytes, apply."""
    parameters = dict(model.named_parameters())
    everyone, sent = outer_scheme(parameters, hparams, settings), 0
    peers: list[tuple[Any, Any]] = []
    for step, batches in enumerate(rounds):
        peers = peers or [
            (local_training(parameters, hparams, settings), outer_scheme(parameters, hparams, settings))
            for _ in batches
        ]
        bodies = []
        for uid, ((local, outer), own) in enumerate(zip(peers, batches, strict=True)):
            work = local.run(model, own, step=step, expect=partial(outer.expected_step, own=None, step=step))
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
