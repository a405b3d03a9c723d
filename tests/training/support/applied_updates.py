"""A run's first weights and its model after some updates, read from files: one program for several processors."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

from tplr.compress.payload import parse
from tplr.hparams import HParams, load_hparams
from tplr.training.fingerprint import digest
from tplr.training.normal_numbers import PortableNormal
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

ROOT = Path(__file__).parents[3]
FILES = ("hparams.json", "hparams-sparseloco.json", "hparams-demo.json")
SHAPES = {"model.layers.0.mlp.up_proj.weight": (192, 130), "lm_head.weight": (128, 64), "model.norm.weight": (130,)}
WINDOWS, MINERS = 4, 5


def first_weights() -> dict[str, torch.Tensor]:
    with PortableNormal(1):
        return {name: torch.empty(shape).normal_(0.0, 0.02) for name, shape in SHAPES.items()}


def constants() -> dict[str, HParams]:
    """Return the constants of each scheme; with outer momentum where there can be one."""
    found = {name: load_hparams(ROOT / name) for name in FILES}
    momentum = {"outer_momentum": 0.5, "outer_nesterov": True}
    for name, one in found.items():
        if one.sparseloco is not None:
            found[name] = one.model_copy(update={"sparseloco": one.sparseloco.model_copy(update=momentum)})
    return found


def pack_updates(folder: Path) -> None:
    """Write the updates of all windows and miners, with norms that differ by up to 100 times."""
    random = np.random.default_rng(0)
    for name, hparams in constants().items():
        miners: list[OuterScheme] = [outer_scheme(first_weights(), hparams) for _ in range(MINERS)]
        for window in range(WINDOWS):
            for uid, miner in enumerate(miners):
                length = 10 ** random.uniform(-5, -3)
                work = {key: torch.from_numpy(length * random.standard_normal(shape)) for key, shape in SHAPES.items()}
                made = {"window": window, "uid": uid, "pages_digest": "00" * 32, "batches": 1}
                body = miner.pack({key: one.float() for key, one in work.items()}, step=window, **made)
                (folder / f"{name}-{window}-{uid}").write_bytes(body)


def digests(folder: Path) -> dict[str, str]:
    """Return SHA-256 digests of the first weights, and of each scheme's model and state after all windows."""
    found = {"first weights": digest(first_weights())}
    for name, hparams in constants().items():
        parameters = first_weights()
        scheme = outer_scheme(parameters, hparams)
        for window in range(WINDOWS):
            bodies = [(folder / f"{name}-{window}-{uid}").read_bytes() for uid in range(MINERS)]
            updates = [parse(one, scheme.spec, window=window, uid=uid) for uid, one in enumerate(bodies)]
            scheme.apply(updates, step=window)
        found[name] = digest(parameters)
        state = b"".join(one.numpy().tobytes() for _, one in sorted(scheme.shared.items()))
        found[f"{name}: state"] = hashlib.sha256(state).hexdigest()
    return found


if __name__ == "__main__":
    json.dump({"capability": torch.backends.cpu.get_cpu_capability()} | digests(Path(sys.argv[1])), sys.stdout)
