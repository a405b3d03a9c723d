"""``ParallelContext`` over the process group of ``torchrun``; PyTorch's FSDP2 shards the parameters."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous

from tplr.errors import ConfigError
from tplr.training.layers import decoder_layers
from tplr.training.parallel import local_rows, rank_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Gradients are reduced in float32, and activations between layers keep their precision, as in a single process.
GATHER_BFLOAT16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)


class ProcessGroupContext:
    """See ``ParallelContext``; uses the default process group, which must exist.

    Args:
        device: device of this rank's shards.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._mesh = init_device_mesh(device.type, (self.size,))

    def shard(self, model: PreTrainedModel, *, gather_bfloat16: bool = False) -> PreTrainedModel:
        """See ``ParallelContext``."""
        policy = GATHER_BFLOAT16 if gather_bfloat16 else MixedPrecisionPolicy()
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=self._mesh, mp_policy=policy)
        # The root is also resharded after a forward pass without a backward pass, because its shards may change.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True)
        return model

    def any(self, flag: bool) -> bool:
        """See ``ParallelContext``."""
        found = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def sum(self, number: float) -> float:
        """See ``ParallelContext``."""
        summed = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.item()

    def gather(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """See ``ParallelContext``."""
        mine = shards[self.rank]
        parts = _flat_shards(shards)
        whole = parts[0].new_empty(0 if mine is None else mine.numel())
        dist.all_to_all_single(whole, torch.cat(parts), self._sizes(mine), [len(part) for part in parts])
        return None if mine is None else whole.view(mine.shape)

    def scatter(self, whole: torch.Tensor | None, shards: Sequence[torch.Tensor | None]) -> None:
        """See ``ParallelContext``."""
        parts = _flat_shards(shards)
        sizes = [len(part) for part in parts]
        received = parts[0].new_empty(sum(sizes))
        sent = received[:0] if whole is None else whole.reshape(-1)
        dist.all_to_all_single(received, sent, sizes, self._sizes(shards[self.rank]))
        for part, new in zip(parts, received.split(sizes), strict=True):
            part.copy_(new)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """See ``ParallelContext``."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        buffer = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        every = [torch.empty_like(buffer) for _ in range(self.size)]
        dist.all_gather(every, buffer)
        return [one[:size].numpy().tobytes() for one, size in zip(every, sizes.tolist(), strict=True)]

    def _sizes(self, tensor: torch.Tensor | None) -> list[int]:
        """Return the number of entries of ``tensor`` on each rank."""
        if tensor is None:
            return [0] * self.size
        rows, columns = len(tensor), math.prod(tensor.shape[1:])
        each = [rank_rows(rows, rank, self.size) for rank in range(self.size)]
        return [(one.stop - one.start) * columns for one in each]


def _flat_shards(shards: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return this rank's entries of each tensor, as views; no entries for None."""
    given = next(local_rows(one)[0] for one in shards if one is not None)
    return [given.new_empty(0) if one is None else local_rows(one)[0].detach().view(-1) for one in shards]


@contextmanager
def joined_process_group(
    device: torch.device, timeout: datetime.timedelta, *, restart: str = "0"
) -> Iterator[ProcessGroupContext]:
    """Join the process group of ``torchrun`` for the duration of the block.

    Args:
        timeout: timeout of a collective, after which a rank that does not answer counts as dead.
        restart: number of times that ``torchrun`` has restarted the ranks. PyTorch 2.13 keeps its store with the
            addresses of the dead ranks, so each start uses its own keys.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except ValueError as error:  # a variable is missing or is not a number
        raise ConfigError(f"{error}: start the ranks with torchrun, or with tplr ROLE --ranks N") from error
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"restart-{restart}", store),  # pyright: ignore[reportPrivateImportUsage] - documented
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    try:
        yield ProcessGroupContext(device)
    finally:
        dist.destroy_process_group()
