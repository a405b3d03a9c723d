"""Hashes that show that nodes hold the same model after the same number of steps.

The *fingerprint* hashes entries at positions that follow from a seed which nobody knows before the window ends. It is
cheap, and nobody can copy it in advance. The *digest* hashes every byte, at intervals.
"""

import bisect
import hashlib
import itertools
from collections.abc import Mapping

import torch

from tplr.seeds import derive


def fingerprint(parameters: Mapping[str, torch.Tensor], *, step: int, seed: int, samples: int) -> str:
    """SHA-256 over the number of outer steps and over ``samples`` entries of the parameters, concatenated by name.

    Position ``i`` is ``derive("position", seed, i) % total``. The step, which sets all schedules, is hashed as eight
    bytes, values as float32, both little-endian.
    """
    names = sorted(parameters)
    ends = list(itertools.accumulate(parameters[name].numel() for name in names))
    picked: dict[str, list[int]] = {name: [] for name in names}
    for i in range(samples):
        position = derive("position", seed, i) % ends[-1]
        which = bisect.bisect_right(ends, position)
        picked[names[which]].append(position - (ends[which - 1] if which else 0))
    result = hashlib.sha256(step.to_bytes(8, "little"))
    for name in names:
        if picked[name]:
            flat = parameters[name].detach().reshape(-1)
            result.update(_bytes(flat[torch.tensor(picked[name], device=flat.device)]))
    return result.hexdigest()


def digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes and float32 values of all parameters, in the order of their names."""
    result = hashlib.sha256()
    for name in sorted(parameters):
        result.update(f"{name}{list(parameters[name].shape)}".encode())
        result.update(_bytes(parameters[name].detach()))
    return result.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    return values.float().cpu().numpy().astype("<f4", copy=False).tobytes()
