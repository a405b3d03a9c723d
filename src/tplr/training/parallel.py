"""The ranks that train one miner's model together, as the training loops see them; a single process is one rank.

Every collective begins with a status word, so no rank waits for one that failed or is out of time (``sharded.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ParallelContext(Protocol):
    """Collectives over the ranks. All ranks call every method but ``to_local`` in the same order.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def shard(self, model: PreTrainedModel) -> PreTrainedModel:
        """Make a model's parameters shards, layer by layer; they may be on the meta device."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Raises ``TrainingError`` if a rank has failed."""
        ...

    def sum(self, number: float) -> float:
        """The sum of ``number`` over all ranks."""
        ...

    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of a sharded tensor; the caller owns it."""
        ...

    def distribute(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """This rank's shard of rank 0's ``whole``, sharded as ``like``; other ranks' ``whole`` is not read."""
        ...

    def to_local(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's entries of a sharded tensor."""
        ...


class SingleProcess:
    """See ``ParallelContext``: one process with whole tensors."""

    rank = 0
    size = 1

    def shard(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    def any(self, flag: bool) -> bool:
        return flag

    def sum(self, number: float) -> float:
        return number

    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def distribute(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        assert whole is not None, f"rank 0 gives the whole, of shape {tuple(like.shape)}"
        return whole

    def to_local(self, part: torch.Tensor) -> torch.Tensor:
        return part


SINGLE_PROCESS = SingleProcess()


def rank_rows(rows: int, rank: int, size: int) -> slice:
    """The rows that ``rank`` of ``size`` has of a tensor, by FSDP's rule; the last ranks may have none."""
    each = -(-rows // size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's rows of a tensor, as a view, and which they are; a plain tensor is whole."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(0, len(tensor) if tensor.dim() else 1)
    mesh = tensor.device_mesh
    return tensor.to_local(), rank_rows(len(tensor), mesh.get_local_rank(), mesh.size())
