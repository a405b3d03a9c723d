"""Interface of training code to the ranks that hold one model together; a single process is one rank.

Over several ranks, each has a shard of every parameter: rows ``[ceil(n / N) * rank, ceil(n / N) * (rank + 1))`` of its
n rows. Work on whole tensors is divided: one rank gathers each tensor (``gather``), works on it and distributes the
result (``scatter``). All ranks call the methods of ``ParallelContext`` in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.tensor import DTensor

from tplr.errors import StateError, TplrError, TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Errors in data that a single rank can find; ``together`` raises them on all ranks.
_SHARED_ERRORS: dict[str, type[TplrError]] = {one.__name__: one for one in (StateError, TrainingError)}


class ParallelContext(Protocol):
    """Collectives over the ranks. All ranks call every method in the same order.

    Attributes:
        rank: rank of this process, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def shard(self, model: PreTrainedModel, *, gather_bfloat16: bool = False) -> PreTrainedModel:
        """Shard a model's parameters, layer by layer; they may be on the meta device.

        Args:
            gather_bfloat16: each layer computes with its float32 weights rounded to bfloat16.
        """
        ...

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank."""
        ...

    def sum(self, number: float) -> float:
        """Return the sum of ``number`` over all ranks."""
        ...

    def gather(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the whole tensor of ``shards[i]`` on rank ``i``, or None if that is None.

        All ranks pass the same tensors. A single process gets the tensor itself, not a copy.
        """
        ...

    def scatter(self, whole: torch.Tensor | None, shards: Sequence[torch.Tensor | None]) -> None:
        """Invert ``gather``: write each rank's ``whole`` into the shards of all ranks."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank."""
        ...


class SingleProcess:
    """See ``ParallelContext``: one process with whole tensors."""

    rank = 0
    size = 1

    def shard(self, model: PreTrainedModel, *, gather_bfloat16: bool = False) -> PreTrainedModel:
        return model

    def any(self, flag: bool) -> bool:
        return flag

    def sum(self, number: float) -> float:
        return number

    def gather(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        return None if shards[0] is None else shards[0].detach()

    def scatter(self, whole: torch.Tensor | None, shards: Sequence[torch.Tensor | None]) -> None:
        """Do nothing: ``whole`` is the tensor itself."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


SINGLE_PROCESS = SingleProcess()


def rank_rows(rows: int, rank: int, size: int) -> slice:
    """Return the rows of a tensor on ``rank`` of ``size``, by FSDP's rule; the last ranks may have none."""
    each = -(-rows // size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """Return this rank's rows of a tensor, as a view, and their indices; a plain tensor is whole."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(0, len(tensor) if tensor.dim() else 1)
    mesh = tensor.device_mesh
    return tensor.to_local(), rank_rows(len(tensor), mesh.get_local_rank(), mesh.size())


@contextmanager
def together(parallel: ParallelContext) -> Iterator[None]:
    """Raise a StateError or TrainingError of any rank on all ranks, at the end of the block.

    No rank may call another collective within the block.
    """
    problem: TplrError | None = None
    try:
        yield
    except tuple(_SHARED_ERRORS.values()) as error:
        problem = error
    texts = parallel.gather_bytes(f"{type(problem).__name__}\n{problem}".encode() if problem else b"")
    if problem:
        raise problem
    for text in filter(None, texts):
        name, message = text.decode().split("\n", 1)
        raise _SHARED_ERRORS[name](message)
