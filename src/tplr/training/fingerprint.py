"""Hashes by which nodes show that they hold the same model, after as many steps.

The *fingerprint* hashes entries at positions that follow from a seed nobody knows before the window ends, so it is
cheap and can't be copied in advance. The *digest* hashes every byte, at intervals.
"""

import bisect
import hashlib
import itertools
from collections.abc import Mapping

import torch

from tplr.seeds import derive


def fingerprint(parameters: Mapping[str, torch.Tensor], *, step: int, seed: int, samples: int) -> str:
    """SHA-256 over the number of outer steps, and ``samples`` entries: positions in all parameters laid end to end, by
    name.

    The number is what schedules go by and can't be seen in the parameters; it is hashed as eight bytes, little-endian.

    Position ``i`` is ``derive("position", seed, i) % total``; values are hashed as little-endian float32.
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
    """SHA-256 over names, shapes and values of all parameters, by name."""
    result = hashlib.sha256()
    for name in sorted(parameters):
        result.update(f"{name}{list(parameters[name].shape)}".encode())
        result.update(_bytes(parameters[name].detach()))
    return result.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    return values.float().cpu().numpy().astype("<f4", copy=False).tobytes()
