"""Hashes that prove that nodes hold the same model after the same number of steps.

The *fingerprint* hashes entries at positions that follow from a seed that is unknown until the window ends. It is
cheap, and nobody can copy it in advance. The *outer fingerprint* does the same for the outer scheme's tensors that are
equal on all nodes. After the window's end anybody can make another model with the same entries at these positions. So
at intervals the *digest* hashes every byte of the model, and the outer fingerprint every entry. None depends on the
number of ranks; every rank gets the hash.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from tplr.seeds import derive
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows
from tplr.training.rows import StoredRows, row_blocks, shape_of


def fingerprint(
    parameters: Mapping[str, torch.Tensor],
    *,
    step: int,
    seed: int,
    samples: int,
    parallel: ParallelContext = SINGLE_PROCESS,
) -> str:
    """Return the SHA-256 over the number of outer steps and ``samples`` entries of the parameters, joined by name.

    Position ``i`` is ``derive("position", seed, i) % total``. The step, which determines all schedules, is hashed as
    eight bytes, values as float32, both little-endian.
    """
    names = sorted(parameters)
    ends = list(itertools.accumulate(shape_of(parameters, name).numel() for name in names))
    picked: dict[str, list[int]] = {name: [] for name in names}
    for i in range(samples):
        position = derive("position", seed, i) % ends[-1]
        which = bisect.bisect_right(ends, position)
        picked[names[which]].append(position - (ends[which - 1] if which else 0))
    held = np.concatenate([_entries(parameters, name, picked[name]) for name in names if picked[name]])
    # Each entry has its value on one rank, and zero bits on the others.
    bits = [np.frombuffer(one, "<u4") for one in parallel.gather_bytes(held.tobytes())]
    return hashlib.sha256(step.to_bytes(8, "little") + np.bitwise_or.reduce(bits).tobytes()).hexdigest()


def outer_fingerprint(
    shared: Mapping[str, torch.Tensor], *, seed: int, samples: int | None, parallel: ParallelContext = SINGLE_PROCESS
) -> str:
    """Return the SHA-256 over the outer scheme's shared tensors: norm caps and outer momentum.

    Of each tensor ``samples`` entries are hashed, or all if there are no more, or with None; position ``i`` is
    ``derive("position", seed, name, i) % entries``. Values are hashed as float32, little-endian. The result is the hash
    of a JSON object: name to the tensor's SHA-256, in name order.

    Args:
        shared: by name; each tensor is whole, and on one rank only.
    """
    hashes = {}
    for name in shared:
        count, hashed = shape_of(shared, name).numel(), hashlib.sha256()
        if samples is None or count <= samples:
            for rows in row_blocks(shared, name):
                hashed.update(_bytes(rows))
        else:
            positions = [derive("position", seed, name, i) % count for i in range(samples)]
            hashed.update(_entries(shared, name, positions).tobytes())
        hashes[name] = hashed.hexdigest()
    for held in parallel.gather_bytes(json.dumps(hashes).encode()):
        hashes |= json.loads(held)
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def digest(parameters: Mapping[str, torch.Tensor], parallel: ParallelContext = SINGLE_PROCESS) -> str:
    """Return the SHA-256 over names, shapes and float32 values of all parameters, in name order."""
    result = hashlib.sha256()
    for name in sorted(parameters):
        result.update(f"{name}{list(shape_of(parameters, name))}".encode())
        for rows in _whole(parameters, name, parallel):
            result.update(_bytes(rows))
    return parallel.gather_bytes(result.hexdigest().encode())[0].decode()  # only rank 0 has hashed the tensors


def _whole(parameters: Mapping[str, torch.Tensor], name: str, parallel: ParallelContext) -> Iterator[torch.Tensor]:
    """Yield all rows of a tensor in blocks. Shards are gathered on rank 0; the other ranks yield nothing."""
    if isinstance(parameters, StoredRows):
        yield from row_blocks(parameters, name)
    elif (whole := parallel.gather([parameters[name], *[None] * (parallel.size - 1)])) is not None:
        yield whole


def _entries(parameters: Mapping[str, torch.Tensor], name: str, positions: list[int]) -> np.ndarray:
    """Return float32 values at these positions of the flattened tensor; zero for positions of other ranks."""
    if isinstance(parameters, StoredRows):
        size = max(1, parameters.shape(name)[1:].numel())
        read = [parameters.rows(name, one // size, 1).reshape(-1)[one % size] for one in positions]
        return torch.stack(read).float().numpy().astype("<f4", copy=False)
    tensor = parameters[name]
    part, rows = local_rows(tensor.detach())
    flat, start = part.reshape(-1), rows.start * (tensor.numel() // max(1, len(tensor) if tensor.dim() else 1))
    here = [(i, position - start) for i, position in enumerate(positions) if 0 <= position - start < len(flat)]
    found = np.zeros(len(positions), "<f4")
    if here:
        where, local = zip(*here, strict=True)
        found[list(where)] = flat[torch.tensor(local, device=flat.device)].float().cpu().numpy()
    return found


def _bytes(values: torch.Tensor) -> memoryview:
    """Return float32 values as little-endian bytes; without a copy if the tensor has that type."""
    return values.float().cpu().contiguous().numpy().astype("<f4", copy=False).reshape(-1).data
